"""The shape of a model from its Hugging Face config.json: which key means which number.

Understood: llama, mistral, qwen2, qwen3, gemma, mixtral, deepseek_v2 and v3, their mixtures of
experts (decoders with the same keys), falcon, opt, bloom, bert, gpt2, vit. What a file leaves out
has that family's default; a key that has none is named in the error. What is no stack of equal
blocks of attention (an encoder beside a decoder, state spaces, hybrids) is refused, since the same
keys mean another model there; another family with a decoder's keys is taken for one, and told.

Source   transformers, configuration_*.py of each family
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest
from shoal.base.shape import Transformer

KNOWN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
    *("gemma3_text", "deepseek_v2", "deepseek_v3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss"),
    *("falcon", "opt", "bloom", "phi", "phi3", "olmo", "olmo2", "olmoe", "cohere", "cohere2"),
    *("granite", "starcoder2", "stablelm", "smollm3", "glm", "glm4", "bert", "roberta"),
    *("vit", "deit"),
)
"""Values of model_type whose keys mean what they mean here."""

TIED = ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "falcon", "opt", "bloom", "bert")
"""Families whose head is the embedding where the file does not say so."""

UNLIKE = {
    "is_encoder_decoder": "has an encoder beside its decoder",
    "encoder_layers": "has an encoder beside its decoder",
    "relative_attention_num_buckets": "has an encoder beside its decoder",
    "state_size": "has no attention",
    "time_step_rank": "has no attention",
    "attn_layer_period": "mixes layers of several kinds",
    "hybrid_override_pattern": "mixes layers of several kinds",
    "layers_block_type": "mixes layers of several kinds",
    "mamba_d_state": "mixes layers of several kinds",
}
"""Keys that no stack of equal blocks has, and what they say of a model."""


def assumed(source: str | Path) -> str:
    """Say in a line what is assumed of a config.json's family; "" where model_type is known.

    A file of several parts (`text_config`) has a line whatever its type; one without a model_type
    counts as llama, which is known.

    source   path of the file or of its folder
    Errors   ConfigError: no such file, no JSON, or JSON that is no object
    """
    _, found = _read(Path(source))
    inner = found.get("text_config")
    if isinstance(inner, Mapping):
        return "a config.json of several parts: its text model alone is planned"
    kind = str(found.get("model_type", "llama"))
    if kind in KNOWN:
        return ""
    return f"model_type {kind} is not known here: planned as a decoder of equal blocks by its keys"


def from_config(source: str | Path | Mapping[str, Any]) -> Transformer:
    """The shape that a Hugging Face config.json describes.

    source   path of the file or of its folder, or what it holds
    Errors   ConfigError: no such file, no JSON, a key that is missing or is no whole number

    >>> from_config({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    ...     "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}).kv_heads
    4
    """
    where, found = ("config.json", source) if isinstance(source, Mapping) else _read(Path(source))
    inner = found.get("text_config")
    config = _Config(where, inner if isinstance(inner, Mapping) else found)
    kind = str(config.found.get("model_type", "llama"))
    _check_alike(config, kind)
    if kind in ("gpt2", "gpt_bigcode"):
        return _from_gpt2(config)
    if kind in ("vit", "deit"):
        return _from_vit(config)
    return _from_decoder(config, kind)


def _check_alike(config: _Config, kind: str) -> None:
    """Errors: ConfigError for a model that the same keys do not describe."""
    for key, why in UNLIKE.items():
        if config.found.get(key):
            raise ConfigError(
                f"{config.where}: model_type {kind} {why}, which no arithmetic here counts; "
                f"try: model.build=pkg.mod:function, whose layers are traced"
            )


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a "
                          f"config.json or of its folder") from error  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON ({error}); give a model's config.json") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: holds no object; give a model's config.json")
    return str(path), found


class _Config:
    """A config.json whose keys are asked for by name, with clear errors."""

    def __init__(self, where: str, found: Mapping[str, Any]) -> None:
        self.where = where
        self.found = found
        self.name = str(found.get("_name_or_path") or found.get("model_type") or "model")

    def whole(self, *keys: str, default: int | None = None) -> int:
        """The whole number under the first of `keys` that is there."""
        for key in keys:
            value = self.found.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.where}: {key} = {value!r}: needs a whole number")
            return value
        if default is not None:
            return default
        close = nearest(keys[0], self.found)
        hint = f"; nearest key there: {close}" if close else ""
        raise ConfigError(f"{self.where}: key {keys[0]} is missing{hint}")

    def flag(self, key: str, default: bool) -> bool:
        """True or false under `key`."""
        return bool(self.found.get(key, default))

    def share(self, *keys: str) -> float:
        """The first number of `keys` that is there, else 0."""
        for key in keys:
            value = self.found.get(key)
            if isinstance(value, int | float):
                return float(value)
        return 0.0


def _from_decoder(config: _Config, kind: str) -> Transformer:
    """Llama and its like; Mixtral's, Qwen's and DeepSeek's experts and latents by their keys."""
    heads = config.whole("num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = config.whole("hidden_size", "d_model", "dim", "n_embed", "n_embd")
    usual = 4 * hidden if kind in ("falcon", "bloom") else None
    width = config.whole("intermediate_size", "ffn_dim", "ffn_hidden_size", default=usual)
    experts = config.whole("num_local_experts", "n_routed_experts", "num_experts", default=0)
    latent: tuple[int, ...] = ()
    head_size = config.whole("head_dim", default=0)
    if "kv_lora_rank" in config.found:
        latent = (
            config.whole("q_lora_rank", default=0),
            config.whole("kv_lora_rank"),
            config.whole("qk_rope_head_dim"),
        )
        head_size = config.whole("v_head_dim")
    expert_ffn = config.whole("moe_intermediate_size", default=width) if experts else 0
    shared = config.whole("shared_expert_intermediate_size", default=0)
    shared = shared or config.whole("n_shared_experts", default=0) * expert_ffn
    bert = kind in ("bert", "roberta")
    plain = bert or kind in ("falcon", "bloom", "opt")
    activation = str(config.found.get("hidden_act", "gelu" if plain else "silu"))
    few = 1 if config.flag("multi_query", kind == "falcon") and kind == "falcon" else heads
    return Transformer(
        name=config.name,
        layers=config.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", "num_kv_heads", default=few),
        ffn=width,
        vocabulary=config.whole("vocab_size"),
        head_size=head_size,
        positions=config.whole("max_position_embeddings") if bert or kind == "opt" else 0,
        gated=activation in ("silu", "swish", "swiglu", "gelu_pytorch_tanh") and not bert,
        norm="layer" if plain or "layer_norm_eps" in config.found else "rms",
        tied=config.flag("tie_word_embeddings", kind in TIED),
        biases=bert,
        dropout=config.share("hidden_dropout_prob", "resid_pdrop"),
        window=config.whole("sliding_window", default=0)
        if config.flag("use_sliding_window", True)
        else 0,
        causal=not bert,
        experts=experts,
        experts_per_token=config.whole("num_experts_per_tok") if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=config.whole("first_k_dense_replace", default=0),
        latent=latent,
        context=config.whole("max_position_embeddings", default=0),
    )


def _from_gpt2(config: _Config) -> Transformer:
    hidden, heads = config.whole("n_embd"), config.whole("n_head")
    return Transformer(
        name=config.name,
        layers=config.whole("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=1 if config.flag("multi_query", False) else heads,
        ffn=config.whole("n_inner", default=4 * hidden),
        vocabulary=config.whole("vocab_size"),
        positions=config.whole("n_positions", "n_ctx"),
        gated=False,
        norm="layer",
        tied=config.flag("tie_word_embeddings", True),
        biases=True,
        dropout=config.share("resid_pdrop"),
    )


def _from_vit(config: _Config) -> Transformer:
    patch, side = config.whole("patch_size"), config.whole("image_size")
    heads, labels = config.whole("num_attention_heads"), config.found.get("id2label")
    return Transformer(
        name=config.name,
        layers=config.whole("num_hidden_layers"),
        hidden=config.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        ffn=config.whole("intermediate_size"),
        vocabulary=len(labels) if isinstance(labels, Mapping) else 1000,
        positions=(side // patch) ** 2 + 1,
        patch=config.whole("num_channels", default=3) * patch * patch,
        gated=False,
        norm="layer",
        biases=config.flag("qkv_bias", True),
        dropout=config.share("hidden_dropout_prob"),
        causal=False,
    )
