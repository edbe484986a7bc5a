"""The guards that compare ranks in the all-reduce of every step, before its update.

A guard adds entries of its own to the step's vector (`step_vector.py`), and reads them back summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from shoal.parallel.program import Program
from shoal.trainer.step_vector import StepNumbers


class StepGuard(Protocol):
    """Compares ranks by numbers of its own that travel in the step's vector."""

    def by_rank(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return entries that every rank shall learn, by name."""

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return entries to be summed over ranks, by name."""

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Compare, before the update. Raises: ShoalError, the same on all ranks."""


def all_around(*contexts: AbstractContextManager[Any] | None) -> AbstractContextManager[None]:
    """Return one context that enters those that are there, in this order."""
    due = [one for one in contexts if one is not None]
    if len(due) < 2:
        return due[0] if due else nullcontext()
    return _entered(due)


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def guards_of(program: Program, *others: StepGuard) -> list[StepGuard]:
    """Return the guards of a run's steps: before `others` that of a layout which gathers units."""
    if program.unit_log is None:
        return list(others)
    from shoal.trainer.unit_order import UnitOrderCheck

    return [UnitOrderCheck(program.unit_log, program.world), *others]


def entries_of(
    guards: Iterable[StepGuard], step: int
) -> tuple[dict[str, Sequence[float]], dict[str, Sequence[float]]]:
    """Return what guards add to the vector of a step: (by rank, summed)."""
    by_rank: dict[str, Sequence[float]] = {}
    sums: dict[str, Sequence[float]] = {}
    for guard in guards:
        by_rank |= guard.by_rank(step)
        sums |= guard.sums(step)
    return by_rank, sums
