"""Row types that describe the parameters of transformers model classes by config.json keys.

There is one row per model_type. A row lists the matrices, norms and biases of a block, and the
defaults of keys that the file omits (those of the type's configuration class).
`tests/proof/hf_counts.py` checks the rows type by type and key by key: it builds each class of the
installed transformers on the meta device and compares the number of parameters. A type without a
row is refused by name: the same keys mean another model there.

Source   transformers 5.23, modeling_*.py and configuration_*.py of each type
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.base.estimates.transformer_shape import TransformerShape

CHECKED = "transformers 5.23"
"""Version of transformers against which the rows were checked."""

Keys = Mapping[str, Any]
"""A config.json, with its type's defaults for keys that it omits. Reading a key without a value by
`[]` raises an error with its name."""

Count = Callable[[TransformerShape, Keys], int]
"""Returns a number of parameters, from the model's shape and its file."""


def _no_parameters(shape: TransformerShape, keys: Keys) -> int:
    return 0


def count_sinks(shape: TransformerShape, keys: Keys) -> int:
    """Return the parameters of attention sinks: one number per head."""
    return shape.heads


@dataclass(frozen=True)
class MixtureRow:
    """Routed experts of a model type, by the keys of its config.json.

    Attributes:
        experts, used: names of the number of experts in the files of this type, in one string; the
            key of the number of experts per token.
        width: key of one expert's width; "" if it is the ffn's own key.
        shared: width of the shared experts, which every token uses.
        dense: number of blocks with a plain ffn, from the file and the number of blocks.
        router, each: vectors of a block's router and shared expert, and of one expert.
    """

    experts: str = "num_experts"
    used: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: Callable[[Keys], int] = lambda keys: 0
    dense: Callable[[Keys, int], int] = lambda keys, layers: 0
    router: Count = _no_parameters
    each: Count = _no_parameters


@dataclass(frozen=True)
class DecoderRow:
    """Parameters of the class that transformers builds for a model_type.

    Attributes:
        classes: architectures that were checked: another head has another count.
        names: other names of a key in the files of this type.
        usual: the type's defaults for keys that the file omits.
        fixed: keys that must have this value, or that of the key it names: another value builds
            another model.
        gated: three matrices in the ffn, or two: by the type, never by the activation's name.
        norm: "rms" (a weight), "layer" (with a bias) or "none" (no parameters).
        norms: number per block; `last` adds one after the last block.
        qk_norm: of queries and keys: "" (none), "head" (one head's width) or "width" (all heads');
            `qk_key` is the key that enables it.
        qkv, o, ffn, head: biases: always, never, or by this key.
        mha: without num_key_value_heads in the file there are as many key and value heads as heads;
            otherwise the file must have it, since the type's own default is a number.
        kv_heads: their number, if the class ignores num_key_value_heads.
        head_dim: the class reads head_dim; otherwise a head is hidden_size / heads wide.
        positions: key of the learned positions.
        encoder: attention sees tokens on both sides.
        width: key of the ffn's width.
        wide: without that key the ffn is four times as wide as the model; with width = "" it always
            is.
        latent: multi-head latent attention; `qkv` are then the biases of its first matrices.
        attention, block_ffn, embedding, top: further parameters of an attention, of a plain ffn,
            beside the token embedding, and of the head.
    """

    classes: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    usual: Keys = field(default_factory=dict)
    fixed: Keys = field(default_factory=dict)
    gated: bool = True
    norm: str = "rms"
    norms: int | Callable[[Keys], int] = 2
    last: bool = True
    qk_norm: str = ""
    qk_key: str = ""
    qkv: bool | str = False
    o: bool | str = False
    ffn: bool | str = False
    head: bool | str = False
    mha: bool = False
    kv_heads: Callable[[Keys, int], int] | None = None
    head_dim: bool = True
    positions: str = ""
    encoder: bool = False
    width: str = "intermediate_size"
    wide: bool = False
    latent: bool = False
    attention: Count = _no_parameters
    block_ffn: Count = _no_parameters
    embedding: Count = _no_parameters
    top: Count = _no_parameters
    mixture: MixtureRow | None = None


ATTENTION: dict[str, Any] = {"qkv": "attention_bias", "o": "attention_bias"}
"""Most types: one key for the biases of attention's four matrices."""
OLMO: dict[str, Any] = {**ATTENTION, "mha": True, "qk_norm": "width"}
"""OLMo 2 and later: one norm over all queries and one over all keys."""
LLAMA: dict[str, Any] = {**ATTENTION, "ffn": "mlp_bias"}
"""ATTENTION, and another key for the biases of the ffn."""
USE_BIAS: dict[str, Any] = {"qkv": "use_bias", "o": "use_bias", "ffn": "use_bias"}
"""One key for all biases."""
TIED = {"tie_word_embeddings": True}
DEEPSEEK: dict[str, Any] = {**ATTENTION, "latent": True, "mha": True}
"""Latent attention; no key states the number of key and value heads."""
