"""List the decoders of transformers whose parameters are counted here, and how each is built.

One row per model_type. A row says which matrices, norms and biases a block has, and what keys mean
that the file leaves out (the defaults of that type's configuration class). The rows are checked,
type by type and key by key, by `tests/proof/hf_counts.py`: it builds each class of the installed
transformers on the meta device and compares the number of parameters. A type without a row is
refused by name: the same keys mean another model there.

Source   transformers 5.23, modeling_*.py and configuration_*.py of each type
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.base.estimates.transformer_shape import Transformer

CHECKED = "transformers 5.23"
"""Version of transformers with which the rows were compared."""

Keys = Mapping[str, Any]
"""A config.json, filled up with what its type takes for keys that it leaves out; what has no value
then is refused by its name when it is read by `[]`."""

Count = Callable[[Transformer, Keys], int]
"""A number of parameters, by the shape of the model and its file."""


def _none(shape: Transformer, keys: Keys) -> int:
    return 0


def sinks(shape: Transformer, keys: Keys) -> int:
    """Return the parameters of attention sinks: one number a head."""
    return shape.heads


@dataclass(frozen=True)
class Mixture:
    """The routed experts of a type, by the keys of its config.json.

    Attributes:
        experts, used: names of the number of experts in the files of this type, in one string; the
            key of how many a token uses.
        width: key of one expert's width; ffn's own key where it is the same.
        shared: width of what every token uses beside them.
        dense: blocks that have a plain ffn, by the file and the number of blocks.
        router, each: vectors of a block's router and shared expert, and of one expert.
    """

    experts: str = "num_experts"
    used: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: Callable[[Keys], int] = lambda keys: 0
    dense: Callable[[Keys, int], int] = lambda keys, layers: 0
    router: Count = _none
    each: Count = _none


@dataclass(frozen=True)
class Decoder:
    """The parameters that a model_type of transformers builds.

    Attributes:
        classes: architectures that were checked: with another head the count is another.
        names: other names of a key in the files of this type.
        usual: what the type takes for keys that the file leaves out.
        fixed: keys that must have this value, or that of the key it names: another one builds
            another model.
        gated: three matrices in the ffn, or two: by the type, never by the activation's name.
        norm: "rms" (a weight), "layer" (with a bias) or "none" (no parameters).
        norms: in a block; there is one more behind the last block, if `last`.
        qk_norm: of queries and keys: "" (none), "head" (one head's width) or "width" (all heads');
            `qk_key` is the key that switches it on.
        qkv, o, ffn, head: biases: always, never, or by this key.
        mha: as many key and value heads as heads where the file has no num_key_value_heads; else it
            must have them, since the type's own default is a number.
        kv_heads: their number, where the class does not read num_key_value_heads.
        head_dim: the class reads head_dim; otherwise a head is hidden_size / heads wide.
        positions: key of the learned positions.
        encoder: sees tokens on both sides.
        width: key of the ffn's width.
        wide: without that key the ffn is four times as wide as the model; with width = "" it always
            is.
        latent: multi-head latent attention; `qkv` are then the biases of its first matrices.
        attention, block_ffn, embedding, top: what is there besides: in an attention, in a plain
            ffn, beside the table of words, in the head.
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
    attention: Count = _none
    block_ffn: Count = _none
    embedding: Count = _none
    top: Count = _none
    mixture: Mixture | None = None


ATTENTION: dict[str, Any] = {"qkv": "attention_bias", "o": "attention_bias"}
"""Most types: one key for the biases of attention's four matrices."""
OLMO: dict[str, Any] = {**ATTENTION, "mha": True, "qk_norm": "width"}
"""OLMo 2 and later: one norm over all queries and one over all keys."""
LLAMA: dict[str, Any] = {**ATTENTION, "ffn": "mlp_bias"}
"""And another one for the ffn's."""
USE_BIAS: dict[str, Any] = {"qkv": "use_bias", "o": "use_bias", "ffn": "use_bias"}
"""One key for all biases."""
TIED = {"tie_word_embeddings": True}
DEEPSEEK: dict[str, Any] = {**ATTENTION, "latent": True, "mha": True}
"""Latent attention, of which no key says how many heads keys and values have."""
