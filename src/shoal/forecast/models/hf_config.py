"""Shape of a Hugging Face model, from its config.json, by model_type.

`hf_types.py` describes each type, so that the number of parameters is exactly that of the class in
transformers. The module refuses by name a type without a row there, a class with another head, a
file of several models (text and vision), and a key that builds something else. Counted by the same
keys, such a model would have a wrong count and a wrong memory verdict.

Source   transformers, configuration_*.py and modeling_*.py of each type
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.estimates.transformer_shape import TransformerShape, VectorParameterCounts
from shoal.forecast.models.hf_dense import DENSE
from shoal.forecast.models.hf_mixtures import MIXTURES
from shoal.forecast.models.hf_types import CHECKED, DecoderRow, MixtureRow

TYPES = {**DENSE, **MIXTURES}
"""Decoders, and text encoders, by model_type."""

VISION = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"}
"""Image classifiers: the types, and the class whose parameters are counted."""

TRY = "try: model.build=pkg.mod:function that returns the module, whose layers are traced"


class UncountedModelError(ConfigError):
    """A ConfigError: parameters are not counted here by arithmetic; the class itself can be."""


def shape_from_config(source: str | Path | Mapping[str, Any]) -> TransformerShape:
    """Return the shape that a Hugging Face config.json describes.

    Args:
        source: path of the file or of its folder, or the parsed content of the file.

    Returns:
        The shape; its number of parameters is that of the class in transformers.

    Raises:
        UncountedModelError: a type, class or key whose parameters are not counted here, or a key
            that is missing.
        ConfigError: no such file, no JSON, or a key with a value of another kind.

    >>> shape_from_config(
    ...     {
    ...         "model_type": "llama",
    ...         "num_hidden_layers": 2,
    ...         "hidden_size": 64,
    ...         "num_attention_heads": 4,
    ...         "intermediate_size": 128,
    ...         "vocab_size": 512,
    ...     }
    ... ).kv_heads
    4
    """
    where, found = ("config.json", source) if isinstance(source, Mapping) else _read(Path(source))
    kind = _check_type(where, found)
    config = _ConfigReader(where, found, TYPES[kind].usual if kind in TYPES else {})
    try:
        return (
            _hf_vit_shape(config, kind)
            if kind in VISION
            else _hf_decoder_shape(config, TYPES[kind])
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{where}: a key that counts has a value of another kind than transformers writes "
            f"({error}); mend it there"
        ) from error


def _check_type(where: str, found: Mapping[str, Any]) -> str:
    """Return the model_type of a file; raise ConfigError for one that is not counted here."""
    kind, text = found.get("model_type"), found.get("text_config")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: has no model_type; give a transformers config.json")
    if kind not in TYPES and isinstance(text, Mapping):
        parts = ", ".join(sorted(key for key in found if key.endswith("_config")))
        known = text.get("model_type") in TYPES
        alone = "for its text model alone: text_config in a file of its own; " if known else ""
        raise UncountedModelError(
            f"{where}: model_type {kind} is made of several models ({parts}), whose parameters "
            f"are not counted together here; {alone}{TRY}"
        )
    if kind not in TYPES and kind not in VISION:
        raise UncountedModelError(
            f"{where}: model_type {kind} is none of the {len(TYPES) + len(VISION)} types whose "
            f"parameters are counted here as {CHECKED} builds them; {TRY}"
        )
    checked = (VISION.get(kind) or TYPES[kind].classes).split()
    classes = found.get("architectures") or checked
    if not isinstance(classes, list) or classes[0] not in checked:
        raise UncountedModelError(
            f"{where}: architectures = {json.dumps(classes)}: of model_type {kind} the parameters "
            f"of {' and '.join(checked)} alone are counted here; {TRY}"
        )
    if found.get("per_layer_config"):
        raise UncountedModelError(
            f"{where}: per_layer_config: parameters are counted here of equal blocks alone; {TRY}"
        )
    if kind in TYPES:
        _check_fixed(where, kind, found)
    return kind


def _check_fixed(where: str, kind: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key whose value builds another model."""
    for key, value in TYPES[kind].fixed.items():
        needed = found.get(value) if isinstance(value, str) else value
        if found.get(key) not in (None, needed):
            raise UncountedModelError(
                f"{where}: {key} = {json.dumps(found[key])}: of model_type {kind} parameters are "
                f"counted here with {json.dumps(needed)} alone; {TRY}"
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


class _Keys(dict[str, Any]):
    """Keys of a config.json; reading a missing key by `[]` raises an error with its name."""

    def __init__(self, where: str, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.where = where

    def __missing__(self, key: str) -> NoReturn:
        close = nearest_word(key, self)
        hint = f"; nearest key there: {close}" if close else ""
        raise UncountedModelError(f"{self.where}: key {key} is missing{hint}")


class _ConfigReader:
    """Reader of a config.json: values by key, with clear errors.

    Args:
        usual: the type's defaults for keys that the file omits.
    """

    def __init__(self, where: str, found: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
        self.where = where
        self.found = _Keys(where, {**usual, **found})
        self.name = str(found.get("_name_or_path") or found.get("model_type") or "model")

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return the integer under any of `keys`, which are alternative names of one number.

        Raises:
            ConfigError: a value of another kind, two values that differ, or no value.
        """
        values = {key: self.found[key] for key in keys if self.found.get(key) is not None}
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.where}: {key} = {value!r}: needs a whole number")
        if len(set(values.values())) > 1:
            said = " and ".join(f"{key} = {value}" for key, value in values.items())
            raise ConfigError(f"{self.where}: {said}: two names of one number; leave one out")
        if values:
            return next(iter(values.values()))
        if default is not None:
            return default
        return self.found.__missing__(keys[0])

    def flag(self, key: bool | str) -> bool:
        """Return whether a component exists: always, never, or as a boolean key says."""
        return key if isinstance(key, bool) else bool(self.found.get(key, False))

    def first_fraction(self, *keys: str) -> float:
        """Return the first number among `keys`, or 0 without one."""
        for key in keys:
            value = self.found.get(key)
            if isinstance(value, int | float):
                return float(value)
        return 0.0


def _hf_decoder_shape(config: _ConfigReader, kind: DecoderRow) -> TransformerShape:
    """Return a stack of equal blocks: matrices from the file's numbers, vectors from its type."""

    def number(key: str) -> int:
        return config.whole(key, *kind.names.get(key, ()))

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    layers = number("num_hidden_layers")
    if hidden % heads and not (kind.head_dim and config.found.get("head_dim")):
        raise ConfigError(
            f"{config.where}: hidden_size = {hidden} is no multiple of {heads} heads; mend it there"
        )
    if kind.kv_heads:
        few = kind.kv_heads(config.found, heads)
    else:
        few = config.whole("num_key_value_heads", default=heads if kind.mha else None)
    wide = 4 * hidden if kind.wide else None
    width = config.whole(*filter(None, (kind.width,)), default=wide)
    shape = TransformerShape(
        name=config.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=few,
        ffn=width,
        vocabulary=config.whole("vocab_size"),
        positions=number(kind.positions) if kind.positions else 0,
        gated=kind.gated,
        norm="layer" if kind.norm == "layer" else "rms",
        tied=config.flag("tie_word_embeddings"),
        dropout=config.first_fraction("hidden_dropout_prob", "resid_pdrop"),
        window=config.whole("sliding_window", default=0)
        if config.found.get("use_sliding_window", True)
        else 0,
        full_layers=_count_full_layers(config.found, layers),
        causal=not kind.encoder,
        context=0 if kind.positions else config.whole("max_position_embeddings", default=0),
        **_head(config, kind),
        **(_mixture(config, kind.mixture, width, layers) if kind.mixture else {}),
    )
    return replace(shape, vectors=_vectors(config, kind, shape))


def _count_full_layers(keys: Mapping[str, Any], layers: int) -> int:
    """Return the blocks whose attention sees all tokens, where others have a sliding window."""
    if named := keys.get("layer_types"):
        return layers - list(named)[:layers].count("sliding_attention")
    if isinstance(every := keys.get("sliding_window_pattern"), int) and every > 0:
        return layers // every
    first = keys.get("max_window_layers") if keys.get("use_sliding_window") else 0
    return min(layers, first) if isinstance(first, int) else 0


def _head(config: _ConfigReader, kind: DecoderRow) -> dict[str, Any]:
    """Return the width of a head; for multi-head latent attention also its ranks."""
    if not kind.latent:
        return {"head_size": config.whole("head_dim", default=0) if kind.head_dim else 0}
    values = config.whole("v_head_dim")
    plain = config.whole("qk_nope_head_dim")
    ranks = (
        config.whole("q_lora_rank", default=0) if config.found["q_lora_rank"] else 0,
        config.whole("kv_lora_rank"),
        config.whole("qk_rope_head_dim", *kind.names.get("qk_rope_head_dim", ())),
    )
    return {"head_size": values, "latent": ranks if plain == values else (*ranks, plain)}


def _mixture(config: _ConfigReader, kind: MixtureRow, width: int, layers: int) -> dict[str, Any]:
    """Return routed and shared experts, and the number of blocks without experts."""
    experts = config.whole(*kind.experts.split())
    if not experts:
        return {}
    return {
        "experts": experts,
        "experts_per_token": config.whole(*dict.fromkeys((kind.used, "num_experts_per_tok"))),
        "expert_ffn": config.whole(kind.width) if kind.width else width,
        "shared_ffn": kind.shared(config.found),
        "dense_layers": kind.dense(config.found, layers),
    }


def _vectors(
    config: _ConfigReader, kind: DecoderRow, shape: TransformerShape
) -> VectorParameterCounts:
    """Return the parameters of norms and biases."""
    keys, h, mixture = config.found, shape.hidden, kind.mixture
    norm = {"rms": h, "layer": 2 * h, "none": 0}[kind.norm]
    norms = kind.norms if isinstance(kind.norms, int) else kind.norms(keys)
    q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = norms * norm + kind.attention(shape, keys)
    if kind.latent:
        q_rank, kv_rank, rope, *_ = shape.latent
        attention += q_rank + kv_rank
        attention += q_rank + kv_rank + rope if config.flag(kind.qkv) else 0
    else:
        attention += q + 2 * kv if config.flag(kind.qkv) else 0
    attention += h if config.flag(kind.o) else 0
    if kind.qk_norm and (not kind.qk_key or config.flag(kind.qk_key)):
        width = q + kv if kind.qk_norm == "width" else 2 * shape.head_width
        attention += width * (2 if kind.norm == "layer" else 1)
    ffn, shared = (
        (2 if kind.gated else 1) * width + h if width and config.flag(kind.ffn) else 0
        for width in (shape.ffn, shape.shared_ffn)
    )
    return VectorParameterCounts(
        embedding=kind.embedding(shape, keys),
        attention=attention,
        ffn=ffn + kind.block_ffn(shape, keys),
        router=mixture.router(shape, keys) + shared if mixture else 0,
        expert=mixture.each(shape, keys) if mixture else 0,
        head=(norm if kind.last else 0)
        + (shape.vocabulary if config.flag(kind.head) else 0)
        + kind.top(shape, keys),
    )


def _hf_vit_shape(config: _ConfigReader, kind: str) -> TransformerShape:
    """Return a vision transformer: blocks on patches of an image, and a classifier."""
    patch, side = config.whole("patch_size"), config.whole("image_size")
    heads, labels = config.whole("num_attention_heads"), config.found.get("id2label")
    h, width = config.whole("hidden_size"), config.whole("intermediate_size")
    head = config.whole("head_dim", default=0) or h // heads
    biases = h + (3 * heads * head if config.found.get("qkv_bias", True) else 0)
    return TransformerShape(
        name=config.name,
        layers=config.whole("num_hidden_layers"),
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_size=head,
        ffn=width,
        vocabulary=len(labels) if isinstance(labels, Mapping) else 2,
        positions=(side // patch) ** 2 + (2 if kind == "deit" else 1),
        patch=config.whole("num_channels", default=3) * patch * patch,
        gated=False,
        norm="layer",
        biases=True,
        vectors=VectorParameterCounts(
            h if kind == "deit" else 0, 4 * h + biases, width + h, head=2 * h
        ),
        dropout=config.first_fraction("hidden_dropout_prob"),
        causal=False,
    )
