"""Lift a model's own casts to a narrow dtype: float64 stays float64 under a cast to float32.

Many models compute norms, rotary tables, softmax or routing in float32 whatever their inputs are.
In a proof, which runs in float64, such a cast rounds to 24 bits on the way. Then two correct
layouts agree to 1e-7 only, and the choices of a top-k may flip. Inside `LiftedCasts` a float64
tensor keeps its dtype; the lines whose casts were ignored are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.trace.isolation.collective_ban import caller_location

NARROW = (torch.float32, torch.bfloat16, torch.float16)
NAMED = (Tensor.float, Tensor.half, Tensor.bfloat16)
"""Methods whose name is the dtype."""

BITS = (Tensor.view, torch.frombuffer)
"""Functions with a dtype argument that reinterprets bits, which is no cast."""


MACHINERY = ("trainer", "parallel", "optim")
"""Folders whose own casts are not the model's: norms of gradients, a number to be reported."""

SHOWN = 2
"""Number of lines that are named; a model may cast in dozens."""


class LiftedCasts(TorchFunctionMode):
    """Torch function mode in which casts from float64 to a narrower floating dtype return float64.

    Attributes:
        lifted: file:line of every line with such a cast, filled as it happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lifted: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("input")
        # Few calls name a dtype, and every call of a proof comes by.
        casts = func not in BITS and (
            func in NAMED or func is Tensor.to or _names_dtype(args, given)
        )
        if casts and isinstance(first, Tensor) and first.dtype == torch.float64:
            if func in NAMED:
                self.record_line()
                return first
            wider = (
                tuple(map(_widen_dtype, args))
                if func is not Tensor.to
                else _widen_to_arguments(args)
            )
            named = {key: _widen_dtype(value) for key, value in given.items()}
            if _differs(wider, args) or _differs(named.values(), given.values()):
                self.record_line()
                args, given = wider, named
        try:
            return func(*args, **given)
        except RuntimeError:
            # If the model cast both operands to one dtype, one of them is float64 now.
            mixed = [_widen_tensor(value) for value in args]
            if not _differs(mixed, args) or getattr(func, "__name__", "_").endswith("_"):
                raise
            return func(*mixed, **given)

    def record_line(self) -> None:
        """Record the line that casts, if it is the model's."""
        line = caller_location(*MACHINERY)
        if line:
            self.lifted.add(line)


def format_casts(lines: Sequence[str]) -> str:
    """Name the lifted casts in one phrase, the first two by line; "" if there was none.

    >>> format_casts(["norm.py:7", "norm.py:9", "rope.py:3"])
    "the model's own casts (norm.py:7, norm.py:9 and 1 more)"
    """
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"the model's own casts ({', '.join(lines[:SHOWN])}{more})" if lines else ""


def _names_dtype(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether an argument of a call is a dtype."""
    return torch.dtype in map(type, args) or torch.dtype in map(type, named.values())


def _widen_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _widen_to_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Widen the arguments of `Tensor.to`, of which one may be a tensor that sets the dtype."""
    return tuple(
        value.double()
        if n and isinstance(value, Tensor) and value.dtype in NARROW
        else _widen_dtype(value)
        for n, value in enumerate(args)
    )


def _widen_tensor(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return value.double()
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return (
            type(value)(_widen_tensor(one) for one in value)
            if type(value) in (list, tuple)
            else value
        )
    return value


def _differs(one: Any, other: Any) -> bool:
    return any(a is not b for a, b in zip(one, other, strict=True))
