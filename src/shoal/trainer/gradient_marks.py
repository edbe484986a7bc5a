"""Remember each parameter's gradient and its count of writes, without reading a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shoal.parallel._torch import writes
from shoal.trainer.bit_sums import here

Marks = Mapping[int, tuple[int, int]]
"""Parameter, by id → its gradient, by id, and how often that was written."""

NO_GRADIENT = (0, 0)
"""The mark of a parameter without one."""


def marks_of(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """Take the marks of some parameters; writes into a DTensor count there, not in its part."""
    return {id(p): _mark(p.grad) for p in parameters}


def changed_since(marks: Marks, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return those with a mark whose gradient is another one, was written, or is gone since."""
    return [p for p in parameters if id(p) in marks and _mark(p.grad) != marks[id(p)]]


def _mark(gradient: torch.Tensor | None) -> tuple[int, int]:
    if gradient is None:
        return NO_GRADIENT
    if not hasattr(gradient, "to_local"):
        return id(gradient), writes(gradient)
    return id(gradient), writes(gradient) + writes(here(gradient))


def any_nonzero(parameters: Sequence[nn.Parameter]) -> bool:
    """Read whether some gradient has an element that is not zero; waits for its device."""
    return any(p.grad is not None and bool((here(p.grad) != 0).any()) for p in parameters)


def is_read(step: int) -> bool:
    """Return whether numbers themselves are read before this step: 1, 2, 4, 8, …"""
    return step > 0 and step & (step - 1) == 0
