"""Facts of Shoal's own models without torch: checked arguments and parameter counts.

The command line checks `[model]` and counts parameters with this module before any process starts;
`shoal.models.catalog` builds the modules from the same tables. Tables: `families.py`; formulas of
the counts: `parameter_counts.py`; transformers models (`hf:PATH`): `huggingface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ConfigError, nearest_word
from shoal.forecast.models.families import FAMILIES, LANGUAGE, PUBLISHED, Argument, Value
from shoal.forecast.models.hf_presence import count_hf_layers, is_hf_name, resolve_hf_config
from shoal.forecast.models.parameter_counts import COUNTS

__all__ = [
    "FAMILIES",
    "LANGUAGE",
    "PUBLISHED",
    "ResolvedModel",
    "count_model_parameters",
    "family_of",
    "resolve_model",
]


@dataclass(frozen=True)
class ResolvedModel:
    """Name and checked arguments of a model that can be built."""

    family: str
    arguments: dict[str, Any]


def family_of(name: str) -> str:
    """Return a model's family: that of a published size, or the name itself, known or not.

    >>> family_of("gpt-2"), family_of("resnet"), family_of("hf:here")
    ('gpt', 'resnet', 'hf:here')
    """
    return PUBLISHED[name][0] if name in PUBLISHED else name


def resolve_model(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> ResolvedModel:
    """Resolve the arguments of Shoal's model `name`: check, fill in defaults, derive the rest.

    Args:
        arguments: the user's keys of [model]; they override those of a published size.
        vocabulary: tokens of the data's tokenizer.
        sequence: tokens per sample; None if unknown or without text data. A language model takes
            both unless the user sets its own, which must be at least as large.

    Raises:
        ConfigError: an unknown model (any `hf:` too) or argument, a wrong type, an impossible
            combination.

    >>> resolve_model("llama", {"dim": 64}, vocabulary=512, sequence=32).arguments["hidden"]
    192
    """
    if name not in FAMILIES and name not in PUBLISHED:
        raise ConfigError(_unknown_model(name))
    family, published = PUBLISHED.get(name, (name, {}))
    specs = {spec.name: spec for spec in FAMILIES[family]}
    given: dict[str, Value] = dict(published)
    for key, value in (arguments or {}).items():
        if key not in specs:
            raise ConfigError(_unknown_argument(name, key, list(specs)))
        given[key] = _check_value(specs[key], value)
    full: dict[str, Any] = {key: given.get(key, spec.default) for key, spec in specs.items()}
    _FINISH.get(family, _finish_nothing)(full, vocabulary, sequence)
    return ResolvedModel(family, full)


def count_model_parameters(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> int | None:
    """Count the trainable parameters of model `name` by arithmetic; tied weights count once.

    Arguments and errors as in `resolve_model`. None for a transformers model (`hf:PATH`), whose
    config.json only transformers interprets; it is checked as in `resolve_hf_config`.

    >>> count_model_parameters("llama-3-8b")
    8030261248
    """
    if is_hf_name(name):
        resolve_hf_config(name, arguments)
        return None
    resolved = resolve_model(name, arguments, vocabulary=vocabulary, sequence=sequence)
    return COUNTS[resolved.family](**resolved.arguments)


def count_model_blocks(name: str, arguments: Mapping[str, Any] | None = None) -> int | None:
    """Count the blocks of model `name` that a pipeline can distribute; None if only its code says.

    Arguments and errors as in `resolve_model`. For `hf:PATH` it is the number of layers in
    config.json, None if the model has several stacks; `arguments` are ignored, and errors are those
    of `resolve_hf_config`.

    >>> count_model_blocks("gpt", {"layers": 6}), count_model_blocks("mlp")
    (6, None)
    """
    if is_hf_name(name):
        return count_hf_layers(name)
    layers = resolve_model(name, arguments).arguments.get("layers")
    return layers if isinstance(layers, int) and family_of(name) != "mlp" else None


def _unknown_model(name: str) -> str:
    names = ", ".join([*FAMILIES, *PUBLISHED])
    close = nearest_word(name, [*FAMILIES, *PUBLISHED])
    hint = f"try: model.name={close}; " if close else ""
    return (
        f"model.name = {name}: not one of {names}; {hint}"
        f"any other model: hf:PATH of a config.json, or model.build=pkg.mod:function"
    )


def _unknown_argument(model: str, key: str, allowed: list[str]) -> str:
    close = nearest_word(
        key, [*allowed, "name", "build", "loss", "call"]
    )  # plus [model]'s own keys
    hint = f"try: model.{close}" if close else f"it has {', '.join(allowed)}"
    return f"model.{key}: no such argument of {model}; {hint}"


def _check_value(spec: Argument, value: Any) -> Value:
    where = f"model.{spec.name} = {value!r}"
    if spec.kind is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: needs true or false; default: {_text(spec.default)}")
    whole = spec.kind is int
    fits = isinstance(value, int) or (not whole and isinstance(value, float))
    if not fits or isinstance(value, bool):
        kind = "a whole number" if whole else "a number"
        default = f"left out: {spec.derived}" if spec.derived else f"default: {_text(spec.default)}"
        raise ConfigError(
            f"{where}: needs {kind}, got {_KINDS.get(type(value), type(value).__name__)}; {default}"
        )
    if spec.derived and value == 0:
        return 0
    if not value >= spec.least:
        raise ConfigError(
            f"{where}: at least {spec.least:g}; try: model.{spec.name}={spec.least:g}"
        )
    if spec.name == "dropout" and value >= 1:
        raise ConfigError(f"{where}: a share below 1; try: model.dropout=0.9")
    return int(value) if whole else float(value)


_KINDS: dict[type, str] = {str: "text", bool: "true or false", float: "a fraction", list: "a list"}


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _finish_nothing(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Do nothing: for families without derived arguments and without rules between them."""


def _finish_llama(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in llama's derived arguments, then check divisibility."""
    heads = full["heads"]
    full["kv_heads"] = full["kv_heads"] or (heads // 2 if heads % 2 == 0 else heads)
    used = full.get("top_k", 1)  # a token's experts together are as wide as a dense SwiGLU
    full["hidden"] = full["hidden"] or -(-8 * full["dim"] // (3 * 64 * used)) * 64
    _fill_from_data(full, vocabulary, sequence)
    kv_heads = full["kv_heads"]
    if heads % kv_heads:
        legal = min(
            (n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: _far(n, kv_heads)
        )
        raise ConfigError(
            f"model.kv_heads = {kv_heads}: does not divide model.heads = {heads}; "
            f"try: model.kv_heads={legal}"
        )
    _check_heads(full["dim"], heads, 2 * heads)


def _finish_moe(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in llama's derived arguments, and check that top_k is at most the number of experts."""
    if full["top_k"] > full["experts"]:
        raise ConfigError(
            f"model.top_k = {full['top_k']}: more than model.experts = {full['experts']}; "
            f"try: model.top_k={full['experts']}"
        )
    _finish_llama(full, vocabulary, sequence)


def _finish_gpt(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in gpt's feed-forward width of 4 · dim, and check that heads divide dim."""
    full["hidden"] = full["hidden"] or 4 * full["dim"]
    _fill_from_data(full, vocabulary, sequence)
    _check_heads(full["dim"], full["heads"], full["heads"])


def _finish_vit(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in a ViT's derived arguments; check that heads divide dim and patches the image."""
    full["hidden"] = full["hidden"] or 4 * full["dim"]
    _check_heads(full["dim"], full["heads"], full["heads"])
    size, patch = full["image_size"], full["patch"]
    if size % patch:
        legal = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: _far(n, patch))
        raise ConfigError(
            f"model.patch = {patch}: does not divide model.image_size = {size}; "
            f"try: model.patch={legal}"
        )


_FINISH: dict[str, Callable[[dict[str, Any], int | None, int | None], None]] = {
    "llama": _finish_llama,
    "gpt": _finish_gpt,
    "moe": _finish_moe,
    "vit": _finish_vit,
}


def _fill_from_data(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in vocabulary and sequence from the data; refuse smaller values than the data's."""
    for key, needed, usual, owner in (
        ("vocabulary", vocabulary, 2048, "the data"),
        ("sequence", sequence, 256, "data.sequence"),
    ):
        full[key] = full[key] or needed or usual
        if needed is not None and full[key] < needed:
            raise ConfigError(
                f"model.{key} = {full[key]}: less than the {needed} of {owner}; "
                f"try: model.{key}={needed}"
            )


def _check_heads(dim: int, heads: int, unit: int) -> None:
    """Check that the width is a multiple of `unit`: the heads, or twice them for rotary pairs."""
    if dim % unit:
        why = "not divisible by" if dim % heads else "gives an odd head size (rotary pairs) with"
        legal = max(
            unit, min(dim // unit * unit, dim // unit * unit + unit, key=lambda n: _far(n, dim))
        )
        raise ConfigError(f"model.dim = {dim}: {why} model.heads = {heads}; try: model.dim={legal}")


def _far(a: int, b: int) -> int:
    return abs(a - b)
