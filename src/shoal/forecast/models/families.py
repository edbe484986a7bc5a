"""Model families: the arguments of each family, and named sizes.

Every key of `[model]` is described here once: its type, default, least value and one line about it.
`shoal.forecast.models.model_facts` checks the user's values against these tables,
`shoal.models.catalog` builds from them, and docs/reference/configuration.md prints them.

Source    Llama 2: Touvron et al. 2023, table 1 and config.json; Llama 3: 2407.21783, table 3;
          GPT-2: openai/gpt-2 hparams; ViT: Dosovitskiy et al. 2020 (2010.11929) table 1;
          Mixtral: 2401.04088 and config.json
"""

from __future__ import annotations

from dataclasses import dataclass

Value = int | float | bool


@dataclass(frozen=True)
class Argument:
    """One key of [model]: its type, default and least value, and one line about it.

    `derived` describes the value that replaces a default of 0; such a key may be left at 0.
    """

    name: str
    kind: type[int] | type[float] | type[bool]
    default: Value
    least: float
    text: str
    derived: str = ""


_DROPOUT = Argument("dropout", float, 0.0, 0.0, "share of activations set to 0 in training")
_VOCABULARY = Argument("vocabulary", int, 0, 1, "tokens it knows", "the tokenizer's, or 2048")
_DIM = Argument("dim", int, 256, 2, "width of the residual stream")
_LAYERS = Argument("layers", int, 4, 1, "blocks")
_SEQUENCE = Argument("sequence", int, 0, 1, "longest sample in tokens", "data.sequence, or 256")
_HEADS = Argument("heads", int, 4, 1, "query heads")
_KV_HEADS = Argument("kv_heads", int, 0, 1, "key/value heads", "heads / 2, or heads if odd")
_ROPE_THETA = Argument("rope_theta", float, 10000.0, 1.0, "base of the rotary angles")
_RMS_EPSILON = Argument("norm_epsilon", float, 1e-5, 0.0, "added to the mean square in RMSNorm")
_TIED = Argument("tied", bool, True, 0, "the head shares the embedding's weight")
_PLAIN_HEADS = Argument("heads", int, 4, 1, "attention heads")
_PLAIN_HIDDEN = Argument("hidden", int, 0, 1, "width of the feed-forward part", "4 · dim")

FAMILIES: dict[str, tuple[Argument, ...]] = {
    "llama": (
        _VOCABULARY,
        _DIM,
        _LAYERS,
        _HEADS,
        _KV_HEADS,
        Argument("hidden", int, 0, 1, "width of SwiGLU", "8/3 · dim, rounded up to 64"),
        _SEQUENCE,
        _ROPE_THETA,
        _RMS_EPSILON,
        _TIED,
        _DROPOUT,
    ),
    "gpt": (
        _VOCABULARY,
        _DIM,
        _LAYERS,
        _PLAIN_HEADS,
        _PLAIN_HIDDEN,
        _SEQUENCE,
        Argument("norm_epsilon", float, 1e-5, 0.0, "added to the variance in LayerNorm"),
        _TIED,
        _DROPOUT,
    ),
    "moe": (
        _VOCABULARY,
        _DIM,
        _LAYERS,
        _HEADS,
        _KV_HEADS,
        Argument("experts", int, 8, 1, "SwiGLUs per block, of which a token uses top_k"),
        Argument("top_k", int, 2, 1, "experts that a token uses"),
        Argument("hidden", int, 0, 1, "width of one expert", "8/3 · dim / top_k, rounded up to 64"),
        Argument("balance", float, 0.01, 0.0, "weight of the load-balance loss; 0 for none"),
        Argument("capacity", float, 0.0, 0.0, "most that an expert takes, 1 is even; 0: whatever"),
        _SEQUENCE,
        _ROPE_THETA,
        _RMS_EPSILON,
        _TIED,
        _DROPOUT,
    ),
    "mlp": (
        Argument("inputs", int, 64, 1, "numbers per sample, after flattening"),
        Argument("hidden", int, 128, 1, "width of the hidden layers"),
        Argument("layers", int, 2, 1, "hidden layers"),
        Argument("classes", int, 10, 1, "labels"),
        _DROPOUT,
    ),
    "resnet": (
        Argument("classes", int, 10, 1, "labels"),
        Argument("image_channels", int, 1, 1, "1 for grey, 3 for colour"),
        Argument("channels", int, 16, 1, "channels after the first convolution"),
        Argument("width", int, 1, 1, "widening factor of every stage (Wide ResNet's k)"),
        Argument("stages", int, 3, 1, "each but the first halves the image, doubles the channels"),
        Argument("blocks", int, 1, 1, "residual blocks per stage"),
    ),
    "vit": (
        Argument("classes", int, 10, 1, "labels"),
        Argument("image_channels", int, 1, 1, "1 for grey, 3 for colour"),
        Argument("image_size", int, 8, 1, "pixels on each side"),
        Argument("patch", int, 2, 1, "pixels on each side of a patch"),
        Argument("dim", int, 64, 1, "width of the residual stream"),
        _LAYERS,
        _PLAIN_HEADS,
        _PLAIN_HIDDEN,
        Argument("norm_epsilon", float, 1e-6, 0.0, "added to the variance in LayerNorm"),
        _DROPOUT,
    ),
}
"""Model families of this version and their arguments, in the builder's order."""

LANGUAGE = ("llama", "gpt", "moe")
"""Families that read tokens and whose loss computes the product with the vocabulary."""


def _llama(
    dim: int, layers: int, heads: int, kv_heads: int, hidden: int, rest: tuple[int, int, float]
) -> dict[str, Value]:
    vocabulary, sequence, rope_theta = rest
    return {
        "vocabulary": vocabulary,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
        "sequence": sequence,
        "rope_theta": rope_theta,
        "tied": False,
    }


def _gpt_2(dim: int, layers: int, heads: int) -> dict[str, Value]:
    return {"vocabulary": 50257, "dim": dim, "layers": layers, "heads": heads, "sequence": 1024}


def _vit(dim: int, layers: int, heads: int) -> dict[str, Value]:
    return {
        "classes": 1000,
        "image_channels": 3,
        "image_size": 224,
        "patch": 16,
        "dim": dim,
        "layers": layers,
        "heads": heads,
    }


_LLAMA_2 = (32000, 4096, 10000.0)
_LLAMA_3 = (128256, 8192, 500000.0)
_MIXTRAL = (32000, 32768, 1000000.0)

PUBLISHED: dict[str, tuple[str, dict[str, Value]]] = {
    "llama-2-7b": ("llama", _llama(4096, 32, 32, 32, 11008, _LLAMA_2)),
    "llama-2-13b": ("llama", _llama(5120, 40, 40, 40, 13824, _LLAMA_2)),
    "llama-3-8b": ("llama", _llama(4096, 32, 32, 8, 14336, _LLAMA_3)),
    "llama-3-70b": ("llama", _llama(8192, 80, 64, 8, 28672, _LLAMA_3)),
    "gpt-2": ("gpt", _gpt_2(768, 12, 12)),
    "gpt-2-medium": ("gpt", _gpt_2(1024, 24, 16)),
    "gpt-2-large": ("gpt", _gpt_2(1280, 36, 20)),
    "gpt-2-xl": ("gpt", _gpt_2(1600, 48, 25)),
    "mixtral-8x7b": ("moe", _llama(4096, 32, 32, 8, 14336, _MIXTRAL)),
    "vit-b": ("vit", _vit(768, 12, 12)),
    "vit-l": ("vit", _vit(1024, 24, 16)),
}
"""Published sizes by their usual names: the family, and the arguments that differ from it."""
