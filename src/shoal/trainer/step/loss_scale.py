"""Loss scale of fp16: a power of two that keeps small gradients above fp16's smallest number.

    backward    of loss × scale; the update divides by it again, in a coefficient it applies anyway
    overflow    some rank's gradients are not finite: all ranks skip the step and halve the scale
    growth      ×2 after 2000 clean steps in a row
    start       2^16 as for a mean loss; the loss here is a sum over targets, so the first overflow
                divides by the targets of a micro-batch at once, and not by 2 step after step

Ranks agree because the flag is part of the step's own all-reduce. A loss that is itself not finite
does not depend on the scale: the step is skipped like any other.

Source: Micikevicius et al. 2018; constants as in torch.amp.GradScaler
"""

from __future__ import annotations

import math
from typing import Any

from shoal.trainer.step.optimizer_step import NO_TARGET, StepTotals, UpdateResult

START, GROWTH_EVERY, LARGEST = 2.0**16, 2000, 2.0**24
LEAST = 2.0**-24
"""Below 1, since the loss is a sum: over 2^18 targets this is 2^-6 of a mean loss."""


class LossScale:
    """Dynamic or fixed loss scale of one run.

    Attributes:
        value: factor of the loss before backward.
        fixed: it never changes.
        clean: steps in a row without overflow.
    """

    def __init__(self, fixed: float = 0.0) -> None:
        self.fixed = fixed > 0
        self.value = fixed if self.fixed else START
        self.clean = 0
        self.began = False

    def update(self, done: UpdateResult, tally: StepTotals) -> bool:
        """Return whether the step overflowed and the scale was lowered; called after every step."""
        if not done.skipped:
            self.handle_clean_step()
            return False
        if tally.loss_broken or done.reason == NO_TARGET:
            return False
        return self.handle_overflow(tally.count / max(1, tally.micro_batches))

    def handle_overflow(self, targets: float = 1.0) -> bool:
        """Lower the scale after an overflow; return whether a smaller scale may still prevent it.

        Args:
            targets: valid targets of a micro-batch, the same number on every rank.
        """
        self.clean = 0
        if self.fixed or self.value <= LEAST:
            return False
        if not self.began and targets > 1:
            self.value = min(self.value, START / 2.0 ** math.ceil(math.log2(targets)))
        self.value = max(LEAST, self.value / 2)
        self.began = True
        return True

    def handle_clean_step(self) -> None:
        """Count a step without overflow, and double the scale after enough of them."""
        self.clean += 1
        self.began = True
        if not self.fixed and self.clean >= GROWTH_EVERY:
            self.value, self.clean = min(LARGEST, self.value * 2), 0

    def state(self) -> dict[str, float]:
        """Return the scale for the checkpoint's record."""
        return {"value": self.value, "clean": self.clean}

    def load(self, record: dict[str, Any]) -> None:
        """Restore the scale of a checkpoint's record; a fixed scale keeps its present value."""
        if not self.fixed:
            self.value, self.clean = float(record["value"]), int(record["clean"])
            self.began = True
