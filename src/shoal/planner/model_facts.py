"""Shoal's own models as facts without torch: arguments, published sizes, parameter counts.

The command line checks `[model]` and counts parameters with this page before any process starts;
`shoal.models.catalog` builds the modules from the same page.

Counts    llama   V·d·(1 or 2) + layers·(2d + d·h·(2·heads + 2·kv_heads) + 3·d·f) + d
                  V vocabulary, d dim, h = d / heads, f hidden
Source    Llama 2: Touvron et al. 2023, table 1 and config.json; Llama 3: 2407.21783, table 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ConfigError, nearest

Value = int | float | bool


@dataclass(frozen=True)
class Argument:
    """One key of [model]: its type and default, its least value, and one line about it.

    `derived` says how a default of 0 is filled in; such a key may be left at 0.
    """

    name: str
    kind: type[int] | type[float] | type[bool]
    default: Value
    least: float
    text: str
    derived: str = ""


@dataclass(frozen=True)
class Resolved:
    """A model that can be built: its family and every argument, checked."""

    family: str
    arguments: dict[str, Any]


_DROPOUT = Argument("dropout", float, 0.0, 0.0, "share of activations set to 0 in training")

FAMILIES: dict[str, tuple[Argument, ...]] = {
    "llama": (
        Argument("vocabulary", int, 0, 1, "tokens it knows", "the tokenizer's, or 2048"),
        Argument("dim", int, 256, 2, "width of the residual stream"),
        Argument("layers", int, 4, 1, "blocks"),
        Argument("heads", int, 4, 1, "query heads"),
        Argument("kv_heads", int, 0, 1, "key/value heads", "heads / 2, or heads if odd"),
        Argument("hidden", int, 0, 1, "width of SwiGLU", "8/3 · dim, rounded up to 64"),
        Argument("sequence", int, 0, 1, "longest sample in tokens", "data.sequence, or 256"),
        Argument("rope_theta", float, 10000.0, 1.0, "base of the rotary angles"),
        Argument("norm_epsilon", float, 1e-5, 0.0, "added to the mean square in RMSNorm"),
        Argument("tied", bool, True, 0, "the head shares the embedding's weight"),
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
}
"""The models of this version and their arguments, in the builder's order."""


def _published(
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


_LLAMA_2 = (32000, 4096, 10000.0)
_LLAMA_3 = (128256, 8192, 500000.0)

PUBLISHED: dict[str, tuple[str, dict[str, Value]]] = {
    "llama-2-7b": ("llama", _published(4096, 32, 32, 32, 11008, _LLAMA_2)),
    "llama-2-13b": ("llama", _published(5120, 40, 40, 40, 13824, _LLAMA_2)),
    "llama-3-8b": ("llama", _published(4096, 32, 32, 8, 14336, _LLAMA_3)),
    "llama-3-70b": ("llama", _published(8192, 80, 64, 8, 28672, _LLAMA_3)),
}
"""Sizes by the names the field gives them: the family, and the arguments that differ from it."""

NOT_BUILT = ("gpt", "moe", "vit")
"""Names of the vocabulary that this version does not build: naming one is a clear refusal."""


def resolve(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> Resolved:
    """Every argument of model `name`: checked, defaults filled in, derived values worked out.

    arguments    the keys of [model] that a user gave
    vocabulary   tokens of the data's tokenizer · sequence  tokens per sample; None if unknown or
                 if the data are no text. A language model must be at least as large as both
    Errors       ConfigError: an unknown model or argument, a wrong type, an impossible combination

    >>> resolve("llama", {"dim": 64}, vocabulary=512, sequence=32).arguments["hidden"]
    192
    """
    if name in NOT_BUILT or (name not in FAMILIES and name not in PUBLISHED):
        raise ConfigError(_unknown_model(name))
    family, published = PUBLISHED.get(name, (name, {}))
    specs = {spec.name: spec for spec in FAMILIES[family]}
    given: dict[str, Value] = dict(published)
    for key, value in (arguments or {}).items():
        if key not in specs:
            raise ConfigError(_unknown_argument(name, key, list(specs)))
        given[key] = _check_value(specs[key], value)
    full: dict[str, Any] = {key: given.get(key, spec.default) for key, spec in specs.items()}
    if family == "llama":
        _finish_llama(full, vocabulary, sequence)
    return Resolved(family, full)


def parameters(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> int:
    """How many numbers model `name` learns, by arithmetic alone; tied weights count once.

    Arguments and errors as in `resolve`. BatchNorm's running statistics are not learnt.

    >>> parameters("llama-3-8b")
    8030261248
    """
    resolved = resolve(name, arguments, vocabulary=vocabulary, sequence=sequence)
    return _COUNTS[resolved.family](**resolved.arguments)


def _unknown_model(name: str) -> str:
    names = ", ".join([*FAMILIES, *PUBLISHED])
    if name in NOT_BUILT:
        return (
            f"model.name = {name}: not built in this version, which has {names}; "
            f"any other model: model.build=pkg.mod:function"
        )
    close = nearest(name, [*FAMILIES, *PUBLISHED])
    hint = f"nearest: model.name={close}; " if close else ""
    return (
        f"model.name = {name}: not one of {names}; {hint}"
        f"any other model: model.build=pkg.mod:function"
    )


def _unknown_argument(model: str, key: str, allowed: list[str]) -> str:
    close = nearest(key, allowed)
    hint = f"nearest: model.{close}" if close else f"it has {', '.join(allowed)}"
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
            f"{where}: at least {spec.least:g}; nearest legal: model.{spec.name}={spec.least:g}"
        )
    if spec.name == "dropout" and value >= 1:
        raise ConfigError(f"{where}: a share below 1; nearest legal: model.dropout=0.9")
    return int(value) if whole else float(value)


_KINDS: dict[type, str] = {str: "text", bool: "true or false", float: "a fraction", list: "a list"}


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _finish_llama(full: dict[str, Any], vocabulary: int | None, sequence: int | None) -> None:
    """Fill in what llama derives, then check what must divide what."""
    heads = full["heads"]
    full["kv_heads"] = full["kv_heads"] or (heads // 2 if heads % 2 == 0 else heads)
    full["hidden"] = full["hidden"] or -(-8 * full["dim"] // (3 * 64)) * 64
    for key, needed, usual, owner in (
        ("vocabulary", vocabulary, 2048, "the tokenizer"),
        ("sequence", sequence, 256, "data.sequence"),
    ):
        full[key] = full[key] or needed or usual
        if needed is not None and full[key] < needed:
            raise ConfigError(
                f"model.{key} = {full[key]}: less than the {needed} of {owner}; "
                f"nearest legal: model.{key}={needed}"
            )
    dim, kv_heads = full["dim"], full["kv_heads"]
    if heads % kv_heads:
        legal = min(
            (n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: _far(n, kv_heads)
        )
        raise ConfigError(
            f"model.kv_heads = {kv_heads}: does not divide model.heads = {heads}; "
            f"nearest legal: model.kv_heads={legal}"
        )
    unit = 2 * heads
    if dim % unit:
        why = "not divisible by" if dim % heads else "gives an odd head size (rotary pairs) with"
        legal = max(
            unit, min(dim // unit * unit, dim // unit * unit + unit, key=lambda n: _far(n, dim))
        )
        raise ConfigError(
            f"model.dim = {dim}: {why} model.heads = {heads}; nearest legal: model.dim={legal}"
        )


def _far(a: int, b: int) -> int:
    return abs(a - b)


def _count_llama(
    *,
    vocabulary: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    tied: bool,
    **_: Any,
) -> int:
    attention = dim * (dim // heads) * (2 * heads + 2 * kv_heads)
    block = 2 * dim + attention + 3 * dim * hidden
    return vocabulary * dim * (1 if tied else 2) + layers * block + dim


def _count_mlp(*, inputs: int, hidden: int, layers: int, classes: int, **_: Any) -> int:
    inner = (layers - 1) * (hidden * hidden + hidden)
    return inputs * hidden + hidden + inner + hidden * classes + classes


def _count_resnet(
    *, classes: int, image_channels: int, channels: int, width: int, stages: int, blocks: int
) -> int:
    total = image_channels * channels * 9 + 2 * channels
    inputs = channels
    for stage in range(stages):
        outputs = channels * width * 2**stage
        for _ in range(blocks):
            total += 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs
            if inputs != outputs:
                total += inputs * outputs + 2 * outputs
            inputs = outputs
    return total + inputs * classes + classes


_COUNTS: dict[str, Callable[..., int]] = {
    "llama": _count_llama,
    "mlp": _count_mlp,
    "resnet": _count_resnet,
}
