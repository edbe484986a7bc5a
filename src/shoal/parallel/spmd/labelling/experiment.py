"""Run one operation on random tensors: on the whole tensors, and on each rank's part of them.

Floating numbers are random float64, so that nothing fits by chance, and positive if others give
NaN. Integers are all distinct and booleans random. An operation that looks up indices may run on
the sample's integers only; then those are used. Buffers that the operation changes count as results
too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.labels import Label, Partial, cut_tensor
from shoal.parallel.spmd.labelling.outcome import is_close


@dataclass(frozen=True)
class ArgumentSlot:
    """Position of tensor number `index` in a call's arguments."""

    index: int


@dataclass(frozen=True)
class OperationInput:
    """Tensor of a call: its shape, its dtype, and its values if they are not floats."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    known: Tensor | None = field(default=None, compare=False)
    digest: bytes = b""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OperationCall:
    """Operation with its arguments; tensors are Slots into `values`.

    Attributes:
        arguments: the template as text: calls with equal texts are the same.
        buffers: positions of buffers, which the operation may change.
    """

    target: Any
    arguments: str
    template: Any = field(compare=False)
    values: tuple[OperationInput, ...] = ()
    buffers: frozenset[int] = frozenset()


class Experiment:
    """Random tensors of a call, and the result of the call on them.

    Attributes:
        changed: buffers that the call changes: position → value afterwards.
        draws: whether the call draws random numbers of its own.
    """

    def __init__(self, call: OperationCall, values: list[Tensor], result: Any) -> None:
        self.call, self.values, self.result = call, values, result
        self.changed: dict[int, Tensor] = {}
        self.draws = False

    @staticmethod
    def of(call: OperationCall) -> Experiment | None:
        """Run a call on random tensors; None if it cannot run on such tensors."""
        looked_at = any(value.known is not None for value in call.values)
        for own, positive in itertools.product(
            (False, True) if looked_at else (True,), (False, True)
        ):
            values = [_make_sample(value, k, positive, own) for k, value in enumerate(call.values)]
            held = _copy_mutable(call, values)
            result = run_call(call, call.template, held)
            if result is None or (not positive and _has_nan(result)):
                continue
            made = Experiment(call, values, result)
            made.changed = {k: held[k] for k in call.buffers if not is_close(held[k], values[k])}
            made.draws = _is_random(call, values, result)
            return made
        return None

    def rank_inputs(
        self, labels: Sequence[Label], once: frozenset[int], rank: int, degree: int
    ) -> list[Tensor]:
        """Make a rank's inputs of the call from the whole tensors, as the labels say.

        Args:
            labels: label of each tensor: split, whole, or a summand over the ranks.
            once: positions of the tensors that rank 0 has whole, and the other ranks as zeros.
            rank, degree: rank on the axis, and number of its ranks.

        Returns:
            one tensor per label.
        """
        held = []
        for k, (value, label) in enumerate(zip(self.values, labels, strict=True)):
            if k in once:
                held.append(value if rank == 0 else torch.zeros_like(value))
            elif isinstance(label, Partial):
                held.append(_make_summand(value, k, rank, degree))
            else:
                held.append(cut_tensor(value, label, rank, degree))
        return held

    def rerun(
        self, template: Any, held: list[Tensor], labels: Sequence[Label], rank: int, degree: int
    ) -> Any:
        """Return the call's result on a rank's inputs; None if it fails or leaves other buffers."""
        mine = _copy_mutable(self.call, held)
        result = run_call(self.call, template, mine)
        if result is None:
            return None
        for k in self.call.buffers:
            after = cut_tensor(self.changed.get(k, self.values[k]), labels[k], rank, degree)
            if not is_close(after, mine[k]):
                return None
        return result


FAILURES = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    AssertionError,
    NotImplementedError,
    ZeroDivisionError,
)


def run_call(call: OperationCall, template: Any, values: Sequence[Tensor]) -> Any:
    """Return the call's result, or None if it fails."""
    args, kwargs = pytree.tree_map_only(ArgumentSlot, lambda slot: values[slot.index], template)
    try:
        with torch.no_grad():
            return call.target(*args, **kwargs)
    except FAILURES:
        return None


def _copy_mutable(call: OperationCall, values: list[Tensor]) -> list[Tensor]:
    """Return the values; copy those that the operation may write to."""
    schema = getattr(call.target, "_schema", None)
    everything = schema is None or schema.is_mutable
    return [v.clone() if everything or k in call.buffers else v for k, v in enumerate(values)]


_pool: list[Tensor] = [torch.empty(0, dtype=torch.float64)]


def _random_numbers(count: int, start: int) -> Tensor:
    """Return `count` numbers of a fixed random sequence, from position `start`."""
    if _pool[0].numel() < start + count:
        generator = torch.Generator().manual_seed(20250)
        size = 2 * (start + count)
        _pool[0] = torch.randn(size, dtype=torch.float64, generator=generator)
    return _pool[0][start : start + count]


def _make_sample(value: OperationInput, place: int, positive: bool, own: bool) -> Tensor:
    """Make a tensor of a call; `own`: integers and booleans are the sample's own."""
    start = 97 * place + 13  # no two tensors of a call are equal
    if value.known is not None and not own:  # a sample's may all be equal: every cut would fit
        numbers = _random_numbers(value.elements, start).view(value.shape)
        if value.dtype == torch.bool:
            return numbers > 0
        return numbers.flatten().argsort().view(value.shape).to(value.dtype)
    if value.known is not None:
        return value.known
    if value.dtype.is_complex:
        pairs = _random_numbers(2 * value.elements, start).view(*value.shape, 2)
        return torch.view_as_complex(pairs)
    numbers = _random_numbers(value.elements, start).view(value.shape)
    return numbers.abs() + 0.1 if positive else numbers


def _make_summand(value: Tensor, place: int, rank: int, degree: int) -> Tensor:
    def drawn(one: int) -> Tensor:
        return _random_numbers(value.numel(), 1009 * one + 89 * place).view(value.shape)

    if rank:
        return drawn(rank)
    return value - torch.stack([drawn(one) for one in range(1, degree)]).sum(0)


def _is_random(call: OperationCall, values: list[Tensor], result: Any) -> bool:
    """Return whether an operation tagged as random gives another result in a second run."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    second = run_call(call, call.template, _copy_mutable(call, values))
    pairs = zip(_tensors(result), _tensors(second), strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)


def _has_nan(result: Any) -> bool:
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in _tensors(result))


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
