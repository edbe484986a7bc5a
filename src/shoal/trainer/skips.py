"""Steps that did not move the weights: who was at fault, and when to stop trying.

One bad step is an accident: all ranks skip it, and an event names rank, micro-batches and samples.
Many in a row are a diverged run or broken data, which a restart would only repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.base.errors import TrainingError
from shoal.base.events import Emit
from shoal.data.step import StepBatch
from shoal.fabric import World
from shoal.trainer.step import NO_TARGET, Tally, Updated

if TYPE_CHECKING:
    from shoal.trainer.loss_scale import LossScale


class Skips:
    """Counts skipped steps in a row; `limit` of them end the run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.any_moved = False
        self.last_reason = "fp16 overflowed at every loss scale"

    def note(
        self,
        step: int,
        done: Updated,
        tally: Tally,
        batch: Any,
        scale: LossScale | None,
        world: World,
        emit: Emit,
    ) -> None:
        """A step is over, whatever it did; every rank calls it. Errors as of `skipped`."""
        if scale is not None and scale.lowered(done, tally):
            if world.is_first:
                emit("loss_scale_lowered", step=step, ranks=tally.broken, scale=scale.value)
        elif done.skipped:
            self.skipped(step, done.reason, tally.broken, batch, world, emit)
        else:
            self.moved()

    def moved(self) -> None:
        """A step moved the weights."""
        self.in_a_row, self.any_moved = 0, True

    def check_moved(self, first: int, last: int, so: str = "no weight moved") -> None:
        """Errors: TrainingError, on all ranks, if no step after `first` moved a weight.

        so   what follows from that, for the message
        """
        if last > first and not self.any_moved:
            raise TrainingError(
                f"steps {first + 1} – {last}: all were skipped: {self.last_reason}; {so}; "
                f"{_cure(self.last_reason)}"
            )

    def skipped(
        self, step: int, reason: str, broken: list[int], batch: Any, world: World, emit: Emit
    ) -> None:
        """A step did not; every rank calls this with its own `batch`, the rest is the same.

        broken   ranks whose numbers are not finite
        Errors   TrainingError, on all ranks, at the `limit`-th in a row
        """
        self.in_a_row, self.last_reason = self.in_a_row + 1, reason
        mine: dict[str, Any] = {"rank": world.rank, "micro_batches": [], "samples": []}
        if isinstance(batch, StepBatch):
            mine["micro_batches"] = [m.index for m in batch.micro_batches]
            mine["samples"] = batch.sample_ids
        culprits = [m for m in world.gather_json(mine) if m["rank"] in broken]
        if world.is_first:
            emit(
                "step_skipped",
                step=step,
                reason=reason,
                ranks=broken,
                culprits=culprits,
                in_a_row=self.in_a_row,
            )
        if self.in_a_row >= self.limit:
            where = ", ".join(f"rank {m['rank']}" for m in culprits) or "all ranks"
            raise TrainingError(
                f"step {step}: {reason} on {where}, {self.in_a_row} steps in a row "
                f"(train.skip_limit); the weights are those of step {step - self.in_a_row}; "
                f"{_cure(reason)}"
            )


def _cure(reason: str) -> str:
    if reason == NO_TARGET:
        return "look at the data, where every target is ignored, or at the count that a loss gives"
    return "look at these samples, lower optimizer.lr, or set optimizer.clip"
