"""Shapes of published models by their usual names.

A shape is a `shoal.base.estimates.transformer_shape`; `shoal.forecast.models.transformer_costs`
computes sizes, FLOP and memory from it. Names are lower case with hyphens: llama-3-8b, gpt-3-175b,
vit-l.

Source    GPT-3: Brown et al. 2020 (2005.14165), table 2.1 · Llama 2: Touvron et al. 2023
          (2307.09288) and config.json · Llama 3, 3.1: 2407.21783, table 3 · Mistral: 2310.06825 ·
          Mixtral: 2401.04088 and config.json · DeepSeek-V2: 2405.04434 · V3: 2412.19437 and
          config.json · ViT: Dosovitskiy et al. 2020 (2010.11929) table 1; g, G: Zhai et al. 2021
          (2106.04560) table 2 · BERT: Devlin et al. 2018 · GPT-2: openai/gpt-2 hparams
"""

from __future__ import annotations

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.hf_config import shape_from_config


def _gpt(
    name: str, layers: int, hidden: int, heads: int, positions: int = 2048
) -> TransformerShape:
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        # the table's 24 heads of 128 (1.3b) and width 5140 (13b) contradict heads · width = hidden
        head_size=0,
        ffn=4 * hidden,
        vocabulary=50257,
        positions=positions,
        gated=False,
        norm="layer",
        tied=True,
        biases=True,
        dropout=0.1 if positions == 1024 else 0.0,
    )


_LLAMA_CONTEXT = {"llama": 2048, "llama-2": 4096, "llama-3": 8192, "llama-3.1": 131072}


def _llama(
    name: str, layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocabulary: int
) -> TransformerShape:
    context = _LLAMA_CONTEXT.get(name.rpartition("-")[0], 0)
    return TransformerShape(
        name, layers, hidden, heads[0], heads[1], ffn, vocabulary, context=context
    )


def _mixtral(
    name: str, layers: int, hidden: int, heads: int, ffn: int, words: int
) -> TransformerShape:
    return TransformerShape(
        name, layers, hidden, heads, 8, ffn, words, experts=8, experts_per_token=2, expert_ffn=ffn
    )


def _vit(
    name: str, layers: int, hidden: int, heads: int, ffn: int, *, patch: int = 16
) -> TransformerShape:
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocabulary=1000,
        positions=(224 // patch) ** 2 + 1,
        patch=3 * patch * patch,
        gated=False,
        norm="layer",
        biases=True,
        causal=False,
    )


def _bert(name: str, layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocabulary=30522,
        positions=512,
        gated=False,
        norm="layer",
        tied=True,
        biases=True,
        dropout=0.1,
        causal=False,
    )


_DEEPSEEK_V2_LITE = TransformerShape(
    name="deepseek-v2-lite",
    layers=27,
    hidden=2048,
    heads=16,
    kv_heads=16,
    ffn=10944,
    vocabulary=102400,
    head_size=128,
    experts=64,
    experts_per_token=6,
    expert_ffn=1408,
    shared_ffn=2816,
    dense_layers=1,
    latent=(0, 512, 64),
)

_DEEPSEEK_V3 = TransformerShape(
    name="deepseek-v3",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    ffn=18432,
    vocabulary=129280,
    head_size=128,
    experts=256,
    experts_per_token=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    latent=(1536, 512, 64),
)

_ALL = (
    _gpt("gpt-2", 12, 768, 12, 1024),
    _gpt("gpt-2-medium", 24, 1024, 16, 1024),
    _gpt("gpt-2-large", 36, 1280, 20, 1024),
    _gpt("gpt-2-xl", 48, 1600, 25, 1024),
    _gpt("gpt-3-125m", 12, 768, 12),
    _gpt("gpt-3-350m", 24, 1024, 16),
    _gpt("gpt-3-760m", 24, 1536, 16),
    _gpt("gpt-3-1.3b", 24, 2048, 16),
    _gpt("gpt-3-2.7b", 32, 2560, 32),
    _gpt("gpt-3-6.7b", 32, 4096, 32),
    _gpt("gpt-3-13b", 40, 5120, 40),
    _gpt("gpt-3-175b", 96, 12288, 96),
    _llama("llama-7b", 32, 4096, (32, 32), 11008, 32000),
    _llama("llama-13b", 40, 5120, (40, 40), 13824, 32000),
    _llama("llama-33b", 60, 6656, (52, 52), 17920, 32000),
    _llama("llama-65b", 80, 8192, (64, 64), 22016, 32000),
    _llama("llama-2-7b", 32, 4096, (32, 32), 11008, 32000),
    _llama("llama-2-13b", 40, 5120, (40, 40), 13824, 32000),
    _llama("llama-2-70b", 80, 8192, (64, 8), 28672, 32000),
    _llama("llama-3-8b", 32, 4096, (32, 8), 14336, 128256),
    _llama("llama-3-70b", 80, 8192, (64, 8), 28672, 128256),
    _llama("llama-3-405b", 126, 16384, (128, 8), 53248, 128256),
    _llama("llama-3.1-8b", 32, 4096, (32, 8), 14336, 128256),
    _llama("llama-3.1-70b", 80, 8192, (64, 8), 28672, 128256),
    _llama("llama-3.1-405b", 126, 16384, (128, 8), 53248, 128256),
    _llama("mistral-7b", 32, 4096, (32, 8), 14336, 32000),
    _mixtral("mixtral-8x7b", 32, 4096, 32, 14336, 32000),
    _mixtral("mixtral-8x22b", 56, 6144, 48, 16384, 32768),
    _DEEPSEEK_V2_LITE,
    _DEEPSEEK_V3,
    _bert("bert-base", 12, 768, 12),
    _bert("bert-large", 24, 1024, 16),
    _vit("vit-s", 12, 384, 6, 1536),
    _vit("vit-b", 12, 768, 12, 3072),
    _vit("vit-l", 24, 1024, 16, 4096),
    _vit("vit-h", 32, 1280, 16, 5120, patch=14),
    _vit("vit-g", 40, 1408, 16, 6144, patch=14),
    _vit("vit-gigantic", 48, 1664, 16, 8192, patch=14),
)

SHAPES: dict[str, TransformerShape] = {shape.name: shape for shape in _ALL}
"""Published shapes by name."""

_SAME = {"-instruct": "", "-hf": "", "-base": "", "meta-": "", "_": "-", "llama2": "llama-2"}
_SAME |= {"llama3": "llama-3", "gpt3": "gpt-3", "gpt2": "gpt-2", "/": "-"}


def get_published_shape(name: str) -> TransformerShape | None:
    """Return the shape of a published model, None for any other name.

    >>> get_published_shape("Llama-3.1-405B").layers, get_published_shape("hf:here")
    (126, None)
    """
    return SHAPES.get(name.strip().lower()) or SHAPES.get(_normalize_name(name))


def _normalize_name(name: str) -> str:
    """Return the name without capitals, underscores and usual suffixes."""
    key = name.strip().lower()
    for old, new in _SAME.items():
        key = key.replace(old, new)
    return key


def published_shape(name: str) -> TransformerShape:
    """Look up the shape of a published model by name.

    Args:
        name: as in `SHAPES`; capitals, underscores and usual suffixes are ignored.

    Raises:
        ConfigError: an unknown name, with the nearest known one.

    >>> published_shape("Llama-3.1-405B").layers, published_shape("vit-b").patch
    (126, 768)
    """
    if found := get_published_shape(name):
        return found
    key = _normalize_name(name)
    close = nearest_word(key, SHAPES)
    hint = f"try: {close}; " if close else ""
    raise ConfigError(
        f"model = {name}: no published shape of that name; {hint}"
        f"others: hf:PATH of a config.json, or one of {', '.join(SHAPES)}"
    )


__all__ = ["SHAPES", "get_published_shape", "published_shape", "shape_from_config"]
