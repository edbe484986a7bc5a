"""Records of a trial of written-out passes: what depends on samples, and what a function does.

FollowedTensor    a tensor that depends on samples, and what it would be for other samples
PassRecord        one micro-batch: numbers that were read, tensors from outside of the loop
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ELEMENTS = 1 << 20
"""Elements of a tensor that is followed, at most."""
RANDOM = re.compile(
    r"rand|dropout|bernoulli|multinomial|poisson|exponential|uniform|geometric|cauchy|gumbel|rrelu"
    r"|^(log_)?normal_?$"
)
"""Names of functions that draw numbers."""
SILENT = frozenset({"requires_grad_", "retain_grad", "register_hook", "backward", "__repr__"})
"""Functions that compute nothing."""
IN_PLACE = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
)
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "__setitem__"})
"""Functions after which a tensor holds nothing of what it held."""


@dataclass
class FollowedTensor:
    """A tensor that depends on samples of a micro-batch.

    Attributes:
        tensor: the tensor, kept so that its id stays.
        micro_batch: number of the micro-batch in the step.
        repeats: what it would be for (A, B), (B, A), (A, A) and (B, B); (): not known.
        sources: ids of tensors from outside of the loop that it depends on.
        is_carried: it depends on samples of an earlier micro-batch too.
    """

    tensor: torch.Tensor
    micro_batch: int
    repeats: Sequence[torch.Tensor] = ()
    sources: frozenset[int] = frozenset()
    is_carried: bool = False


@dataclass
class PassRecord:
    """Record of one micro-batch.

    Attributes:
        orders: places of the rows of (A, B), (B, A), (A, A) and (B, B); (): it has one sample.
        is_unsure: an operation could not be repeated.
        reads: numbers that the loop read of samples.
        numbers: numbers that the loop gave to torch functions beside samples.
        is_coupled: the equation does not hold.
        derived: tensors that the loop made without samples, with the ids of those from outside that
            they depend on.
        outer: tensors from outside that the loop used.
        read: ids of those that met samples.
        written: tensors from outside that samples changed.
        overwritten: those of them that hold nothing of before.
        sources: ids of tensors from outside that its loss depends on.
    """

    orders: Sequence[torch.Tensor] = ()
    is_unsure: bool = False
    reads: list[str] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    is_coupled: bool = False
    derived: dict[int, tuple[torch.Tensor, frozenset[int]]] = field(default_factory=dict)
    outer: dict[int, torch.Tensor] = field(default_factory=dict)
    read: frozenset[int] = frozenset()
    written: dict[int, torch.Tensor] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)
    sources: frozenset[int] = frozenset()


def match_rows(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], own: torch.Tensor
) -> torch.Tensor | None:
    """Return the order in which rows of tensors are those of their repeats; None: there is none.

    Args:
        pairs: a tensor and its repeat.
        own: the order of the micro-batch's samples, which is tried first.
    """
    for leaf, repeat in pairs:
        if not leaf.ndim or leaf.shape != repeat.shape:
            return None
    rows, numbers = len(pairs[0][0]), pairs[0][0].numel()
    orders = [own] if rows == len(own) else []
    if rows * numbers <= ELEMENTS:
        leaf, repeat = pairs[0]
        one, other = leaf.detach().reshape(rows, -1), repeat.reshape(rows, -1)
        orders.append((other[:, None] == one[None]).all(-1).int().argmax(1).cpu())
    for order in orders:
        if all(torch.equal(leaf.detach()[order.to(leaf.device)], repeat) for leaf, repeat in pairs):
            return order
    return None


def is_random(name: str) -> bool:
    """Return whether a function draws numbers."""
    return RANDOM.search(name) is not None


def is_in_place(name: str) -> bool:
    """Return whether a function writes its first argument."""
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
