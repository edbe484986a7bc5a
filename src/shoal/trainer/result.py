"""What one optimizer step tells its caller."""

from __future__ import annotations

from dataclasses import dataclass


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
