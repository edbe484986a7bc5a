"""A run whose loop is another library's: it calls the model and backward, and says when to update.

Layouts that such a loop can carry hold the whole model in every forward pass: ddp, zero 1 to 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.trainer.free_passes import FreePasses
from shoal.trainer.run import Run
from shoal.trainer.step import StepResult

count_of: Callable[[torch.Tensor], torch.Tensor] | None = None
"""Finds how many targets a loss is the mean of, where losses are weighed by that (`exact.py`)."""


class FreeLoop:
    """The steps of a run, made pass by pass.

    last   what the last update did; None before the first
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.last: StepResult | None = None

    @property
    def under_way(self) -> bool:
        """Whether a forward pass waits for its backward."""
        return self.run.free is not None and self.run.free.under_way

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; in training, as a pass of the step under way."""
        return self._passes().forward(*inputs, **named)

    def backward(
        self, loss: torch.Tensor, *, share: float, last: bool, retain_graph: bool = False
    ) -> None:
        """Add the gradients of `share` of a loss; `last`: no pass of this step comes after it."""
        count = count_of(loss) if count_of and isinstance(loss, torch.Tensor) else None
        passes = self._passes()
        passes.backward(loss, share=share, last=last, retain_graph=retain_graph, count=count)

    def norm(self) -> float:
        """Sum gradients over ranks; gives the norm of the mean gradient. Every rank calls it."""
        tally = self._passes().finish()
        return tally.norm / (tally.count * self.run.scale)

    def clip(self, norm: float) -> None:
        """Let updates clip the mean gradient from here on; 0: none."""
        if self.run.plan.clip != norm:
            self.run.program = self.run.program.but(clip=norm)

    def drop(self) -> None:
        """Forget the gradients of the step under way."""
        self.run.free = None

    def update(self) -> StepResult:
        """Sum gradients over ranks, clip them, step the optimizer; or skip that, on all ranks."""
        self._passes()
        self.last = self.run.update()
        return self.last

    def _passes(self) -> FreePasses:
        run = self.run
        if run.free is None:
            with run.meeting.at("the first pass of a step"):
                run.begin(None)
                run.free = FreePasses(run.program, run.step_count, run.scale, run.flags)
        return run.free
