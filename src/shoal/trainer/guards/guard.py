"""Interface of a guard, which watches the steps of a run for one kind of mistake.

A step calls its guards at fixed points, only those that are due and have work there:

    before      the batch is here, nothing has run
    around      a context around the forward and backward passes
    sums        numbers for the step's one all-reduce, as many on every rank
    invariants  values that ranks must have in common, for the same all-reduce
    agree       all ranks know the sums; nothing was updated yet
    between     `run.update` begins, and code of the user's ran since the passes
    updating    the update begins
    updated     the update is over, or was skipped
    close       the run ends

A guard changes no number: a run with `guards="off"` computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shoal.trainer.step.micro_batch import combine_contexts
from shoal.trainer.step.step_vector import Invariant, StepNumbers


class Guard:
    """Watcher for one kind of mistake; a subclass overrides the methods where it has work."""

    def due(self, step: int) -> bool:
        """Return whether this guard has work in a step, from 1; the same on all ranks."""
        return True

    def before(self, step: int, batch: Any) -> None:
        """Check the batch and the model before a step."""

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None] | None:
        """Return a context around the passes, or None."""
        return None

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return entries of the step's vector, to be summed over ranks, by name."""
        return {}

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return values that must be equal on the ranks of a group."""
        return ()

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Check the all-reduced numbers of a step, and raise the same error on all ranks.

        Args:
            step: number of the step, from 1; 0: an evaluation.
            numbers: the `sums` and `invariants` of all guards on all ranks.

        Raises:
            ShoalError: a mistake was found, before the update.
        """

    def between(self, step: int) -> None:
        """Check what user code did between the passes and the update."""

    def updating(self, step: int) -> None:
        """Check the optimizer before its step."""

    def updated(self, step: int, *, skipped: bool) -> None:
        """Note an update, or a step whose update was skipped."""

    def close(self) -> None:
        """Remove hooks and wrappers from the user's objects."""


class Guards:
    """Guards of a run, in order.

    Attributes:
        all: every guard, due or not.
        on: False: only `close` calls the guards.
    """

    def __init__(self, guards: Sequence[Guard], *, on: bool = True) -> None:
        self.all, self.on = list(guards), on
        self._step, self._resting = -1, list[Guard]()
        self._at: dict[str, list[Guard]] = {}
        # Most guards are due in every step, and are not asked.
        self._timed = [one for one in self.all if type(one).due is not Guard.due]

    def add(self, guard: Guard) -> None:
        """Append a guard that is called after the others."""
        Guards.__init__(self, [*self.all, guard], on=self.on)

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None]:
        """Return one context of all guards that are due, the first one outermost."""
        return combine_contexts(
            *[one.around(step, micro_batches) for one in self.at("around", step)]
        )

    def sums(self, step: int) -> dict[str, Sequence[float]]:
        """Return the vector entries of all guards that are due."""
        entries: dict[str, Sequence[float]] = {}
        for guard in self.at("sums", step):
            entries |= guard.sums(step)
        return entries

    def invariants(self, step: int) -> list[Invariant]:
        """Return the invariants of all guards that are due."""
        return [one for guard in self.at("invariants", step) for one in guard.invariants(step)]

    def close(self) -> None:
        """Close all guards, due or not."""
        for guard in self.all:
            guard.close()

    def at(self, place: str, step: int) -> list[Guard]:
        """Return the guards that are due in a step and override the method named `place`."""
        if step != self._step:
            self._step, before = step, self._resting
            resting = [one for one in self._timed if not one.due(step)] if self.on else self.all
            self._resting = resting
            self._at = self._at if self._resting == before else {}
        if place not in self._at:
            plain = getattr(Guard, place)
            due = [one for one in self.all if one not in self._resting]
            self._at[place] = [one for one in due if getattr(type(one), place) is not plain]
        return self._at[place]
