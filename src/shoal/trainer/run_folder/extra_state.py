"""JSON encoding of the values that users save with a run, such as the state of a scheduler.

The values stand in the record of the checkpoint and are decoded to the same Python values. JSON has
no infinity, no tuples and no keys but strings, and the state of a scheduler has all three.

    plain          None, bool, int, float, str, lists, dicts with strings as keys
    {"": KIND, …}  tuple, set, Counter, dict with other keys, inf and nan, a tensor without dims
    objects        with `state_dict()`, which stands in place of the object
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.fabric import World

MOST_BYTES = 2**20
"""Limit of all extra values together: every reader of a manifest reads them whole."""

KINDS = {"tuple": tuple, "set": set, "deque": deque}
"""Sequence types that JSON lacks, by the names under which they are written."""


def encode_value(value: Any, name: str = "extra") -> Any:
    """Return a value as JSON that `decode_value` turns into the same value.

    Raises:
        ConfigError: the value, or one inside it, is not plain; the message names its place.
    """
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return encode_value(value.state_dict(), f"{name}.state_dict()")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"": "float", "of": str(value)}
    if isinstance(value, Mapping):
        return _encode_dict(value, name)
    for kind, type_ in (("list", list), *KINDS.items()):
        if isinstance(value, type_):
            items = [encode_value(one, f"{name}[{place}]") for place, one in enumerate(value)]
            return items if kind == "list" else {"": kind, "of": items}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # of torch, of numpy
        if isinstance(value, torch.Tensor):
            told = encode_value(value.item(), name)
            return {"": "tensor", "of": told, "dtype": str(value.dtype).removeprefix("torch.")}
        return encode_value(value.item(), name)
    near = "its .tolist()" if hasattr(value, "tolist") else "numbers that it can be made of again"
    raise ConfigError(
        f"{name}: {type(value).__name__} cannot be saved; plain values and objects with "
        f"state_dict() can; try: {near}"
    )


def _encode_dict(value: Mapping[Any, Any], name: str) -> Any:
    plain = all(isinstance(key, str) and key for key in value)
    if plain and not isinstance(value, Counter):
        return {key: encode_value(one, f"{name}.{key}") for key, one in value.items()}
    pairs = [
        [encode_value(key, name), encode_value(one, f"{name}[{key!r}]")]
        for key, one in value.items()
    ]
    return {"": "counter" if isinstance(value, Counter) else "dict", "of": pairs}


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` wrote as JSON."""
    if isinstance(value, list):
        return [decode_value(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("")
    if kind is None:
        return {key: decode_value(one) for key, one in value.items()}
    inside = value.get("of")
    if kind == "float":
        return float(str(inside))
    if kind == "tensor":
        return torch.tensor(decode_value(inside), dtype=getattr(torch, value["dtype"]))
    if kind in KINDS:
        return KINDS[kind](decode_value(one) for one in inside or ())
    pairs = {decode_value(key): decode_value(one) for key, one in inside or ()}
    return Counter(pairs) if kind == "counter" else pairs


def encode_extra(extra: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Encode the extra values of every rank, which must be equal.

    Raises:
        ConfigError: the same on all ranks, if ranks differ, or `encode_value` refuses a value.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"extra: a dict of names and values is wanted, got {type(extra).__name__}; try: "
            f'run.save(extra={{"state": …}})'
        )
    try:
        told = {str(name): encode_value(one, f"extra.{name}") for name, one in extra.items()}
        failure = ""
    except ConfigError as error:  # maybe on some ranks only: all ranks must raise together
        told, failure = {}, str(error)
    failures = [line for line in world.gather_json(failure) if line]
    if failures:
        raise ConfigError(failures[0])
    size_bytes = len(str(told))
    if size_bytes > MOST_BYTES:
        raise ConfigError(
            f"extra: {size_bytes} bytes of text, at most {MOST_BYTES} are kept; try: tensors "
            f"in a file of your own, and its name in extra"
        )
    unlike = world.find_differing_rank({name: str(one) for name, one in told.items()})
    if unlike is not None:
        rank, first, other = unlike
        name = next(n for n in [*first, *other] if first.get(n) != other.get(n))
        raise ConfigError(
            f"extra.{name}: {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}; "
            f"try: values of run.step's and run.evaluate's results, which all ranks have alike"
        )
    return told
