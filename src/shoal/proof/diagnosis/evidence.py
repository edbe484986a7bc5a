"""Evidence about a trajectory that is not equal; expensive parts are computed on first use.

A look is a function that tests one cause against it. `causes.py` has those of the product; our
tests try their own first, which name the mistakes that they plant inside Shoal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.gradient_sums import (
    GradientSums,
    accept_shares,
    solve_micro_batch_shares,
    undo_clipping,
)
from shoal.proof.diagnosis.micro_batch_gradients import (
    GradientShares,
    MicroBatchGradients,
    watch_micro_batches,
)
from shoal.proof.tensor_spill import TensorSpill
from shoal.proof.trajectory_record import TrajectoryRecord
from shoal.proof.verdict import GRADIENTS, RecordComparison
from shoal.trainer.run import Run

OnRun = Callable[[str, Run], None]
"""Called with the label and every run as it is made, before its first step."""


@dataclass(frozen=True)
class Evidence:
    """Records of one process and of the layout, and their differences.

    Attributes:
        expected, got: the records of the one process and of the layout.
        again: trains the one process once more up to (label, step), and passes each of its runs to
            a function.
    """

    expected: TrajectoryRecord
    got: TrajectoryRecord
    comparison: RecordComparison
    again: Callable[[tuple[str, int], OnRun], None]

    @cached_property
    def number(self) -> int | None:
        """Index of the first row with a wrong gradient or gradient norm; None without one."""
        rows = [d.row for d in self.comparison.differences if d.what in GRADIENTS]
        return min(rows, default=None)

    @cached_property
    def sums(self) -> GradientSums | None:
        """Both sides' gradients in that row, with clipping undone."""
        return None if self.number is None else undo_clipping(self.expected, self.got, self.number)

    @cached_property
    def micro_batch_gradients(self) -> MicroBatchGradients | None:
        """Gradients of every micro-batch of that step; None if it cannot be run again."""
        if self.number is None:
            return None
        found = MicroBatchGradients(
            self.got.layout.data_degree, shelf=TensorSpill(self.expected.shelf.folder)
        )
        row = self.expected.rows[self.number]
        try:
            self.run_again(partial(watch_micro_batches, found, row.label, row.step))
        except Exception:  # a proven difference must be reported, even without the whole cause
            return None
        return found

    @cached_property
    def shares(self) -> GradientShares | None:
        """Shares of the micro-batches' gradients in the wrong gradients, if solvable."""
        return (
            None
            if self.sums is None
            else solve_micro_batch_shares(self.sums, self.micro_batch_gradients)
        )

    @cached_property
    def weights(self) -> tuple[float, ...] | None:
        """Weight of each micro-batch in the wrong gradients, if those explain them."""
        return accept_shares(self.shares)

    def run_again(self, watch: OnRun) -> None:
        """Train the single-process reference once more, up to the end of the first wrong step.

        Does nothing if no gradient is wrong.

        Raises:
            Exception: any of the model's own.
        """
        if self.number is not None:
            row = self.expected.rows[self.number]
            self.again((row.label, row.step), watch)


CauseTest = Callable[[Evidence], Clue | None]
"""A function that tests for one cause: it returns a clue, or None if the cause is another."""
