"""All that is known about a trajectory that is not equal; what costs time is found when asked for.

A look is one question asked of it: is this the cause? `causes.py` has those of the product; our
tests ask their own first, which name the mistakes that they plant inside Shoal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.gradient_sums import Sums, fits, solve, sums_of
from shoal.proof.diagnosis.micro_batch_gradients import Atoms, Shares, watch_micro_batches
from shoal.proof.tensor_spill import Shelf
from shoal.proof.trajectory_record import Record
from shoal.proof.verdict import GRADIENTS, Comparison
from shoal.trainer.run import Run

OnRun = Callable[[str, Run], None]
"""Called with the label and every run as it is made, before its first step."""


@dataclass(frozen=True)
class Evidence:
    """What one process and the layout computed, and where they differ.

    Attributes:
        expected, got: the records of the one process and of the layout.
        again: trains the one process once more up to (label, step), and gives each of its runs to a
            function.
    """

    expected: Record
    got: Record
    comparison: Comparison
    again: Callable[[tuple[str, int], OnRun], None]

    @cached_property
    def number(self) -> int | None:
        """Index of the first row with a wrong gradient or gradient norm; None without one."""
        rows = [d.row for d in self.comparison.differences if d.what in GRADIENTS]
        return min(rows, default=None)

    @cached_property
    def sums(self) -> Sums | None:
        """Both sides' gradients in that row, clipping taken off."""
        return None if self.number is None else sums_of(self.expected, self.got, self.number)

    @cached_property
    def atoms(self) -> Atoms | None:
        """The gradient of every micro-batch of that step; None where it cannot be run again."""
        if self.number is None:
            return None
        found = Atoms(self.got.layout.data_degree, shelf=Shelf(self.expected.shelf.folder))
        row = self.expected.rows[self.number]
        try:
            self.run_again(partial(watch_micro_batches, found, row.label, row.step))
        except Exception:  # a difference that is proven must be told, with less of a cause
            return None
        return found

    @cached_property
    def shares(self) -> Shares | None:
        """What the wrong gradients are made of, as well as shares of micro-batches tell it."""
        return None if self.sums is None else solve(self.sums, self.atoms)

    @cached_property
    def weights(self) -> tuple[float, ...] | None:
        """The weight of each micro-batch in the wrong gradients, if those explain them."""
        return fits(self.shares)

    def run_again(self, watch: OnRun) -> None:
        """Train the one process once more up to the end of the first wrong step.

        Raises:
            whatever the model raises; nothing is done where no gradient is wrong.
        """
        if self.number is not None:
            row = self.expected.rows[self.number]
            self.again((row.label, row.step), watch)


Look = Callable[[Evidence], Clue | None]
"""Names a cause, or gives None where it does not know the like."""
