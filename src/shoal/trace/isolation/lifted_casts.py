"""A model's own casts to a narrow format, lifted: float64 stays float64 where it asks for float32.

Many models compute norms, rotary tables, softmax or routing in float32 whatever they are given. In
a proof, which runs in float64, such a cast rounds to 24 bits on its way, so two right layouts agree
to 1e-7 only, and what a top-k chooses may flip. Inside `CastsLifted` a float64 tensor keeps its
format; what the model asked for in vain is noted, by the line that asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.trace.isolation.collective_ban import called_from

NARROW = (torch.float32, torch.bfloat16, torch.float16)
NAMED = (Tensor.float, Tensor.half, Tensor.bfloat16)
"""Methods whose name is the format."""

BITS = (Tensor.view, torch.frombuffer)
"""Take a format to read bits by, which is no cast."""


MACHINERY = ("trainer", "parallel", "optim")
"""Rooms whose own casts are no model's: norms of gradients, a number to be told."""

SHOWN = 2
"""Lines that are named; a model may cast in dozens."""


class CastsLifted(TorchFunctionMode):
    """Context manager in which casts from float64 to a narrower floating format give float64.

    Attributes:
        lifted: file:line of every line that asked for one, filled as it happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lifted: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("input")
        if isinstance(first, Tensor) and first.dtype == torch.float64 and func not in BITS:
            if func in NAMED:
                self.note()
                return first
            wider = tuple(map(_wider, args)) if func is not Tensor.to else _to(args)
            named = {key: _wider(value) for key, value in given.items()}
            if _changed(wider, args) or _changed(named.values(), given.values()):
                self.note()
                args, given = wider, named
        try:
            return func(*args, **given)
        except RuntimeError:
            # Where the model brought both operands to one format, one of them is float64 now.
            mixed = [_double(value) for value in args]
            if not _changed(mixed, args) or getattr(func, "__name__", "_").endswith("_"):
                raise
            return func(*mixed, **given)

    def note(self) -> None:
        """Keep the line that casts, if it is the model's."""
        line = called_from(*MACHINERY)
        if line:
            self.lifted.add(line)


def casts_text(lines: Sequence[str]) -> str:
    """Name the casts that were lifted in one phrase, the first two by line; "" where none was.

    >>> casts_text(["norm.py:7", "norm.py:9", "rope.py:3"])
    "the model's own casts (norm.py:7, norm.py:9 and 1 more)"
    """
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"the model's own casts ({', '.join(lines[:SHOWN])}{more})" if lines else ""


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _to(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `Tensor.to`, of which one may be a tensor to be alike."""
    return tuple(
        value.double()
        if n and isinstance(value, Tensor) and value.dtype in NARROW
        else _wider(value)
        for n, value in enumerate(args)
    )


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return value.double()
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return type(value)(_double(one) for one in value) if type(value) in (list, tuple) else value
    return value


def _changed(one: Any, other: Any) -> bool:
    return any(a is not b for a, b in zip(one, other, strict=True))
