"""What one optimizer step tells its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.step import StepBatch

if TYPE_CHECKING:
    from shoal.trainer.step import Tally


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    step        number of this step, from 1 · loss  mean over the targets of all ranks
    grad_norm   of the mean gradient, before clipping · lr  of the first parameter group
    targets     what the loss was divided by: the count of targets, or the sum of their weights
    skipped     the weights did not move, for `reason`
    item()      the loss, so that a script's `loss.item()` works on `loss = run.step(batch)`
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: float
    skipped: bool
    reason: str

    def item(self) -> float:
        """The loss, under the name that a tensor has for it."""
        return self.loss


def counted(count: float) -> float:
    """A whole count as an integer; a sum of weights as it is."""
    return int(count) if count.is_integer() else count


def row_of(
    result: StepResult, tally: Tally, batch: Any, data_wait_s: float, extras: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """(what metrics.jsonl keeps of a step, samples of the whole step where they are known)."""
    samples = 0
    if isinstance(batch, StepBatch):
        extras = {**extras, "samples": [batch.position, batch.next_position]}
        samples = batch.next_position - batch.position
    row = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.targets,
        "data_wait_s": data_wait_s,
        "peak_memory_bytes": max(tally.peak_memory_bytes),
        "peak_memory_bytes_by_rank": tally.peak_memory_bytes,
        "skipped": result.skipped,
        **extras,
    }
    return row, samples
