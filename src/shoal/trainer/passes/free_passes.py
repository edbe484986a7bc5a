"""Passes of one step in a loop that calls model, loss and backward in any order.

    run.begin(None)
    run.step_state.written = passes = FreePasses(run.program, run.step_count, run.scale, run.flags)
    loss = loss_of(passes.forward(inputs))                as often as the loop likes
    passes.backward(loss, share=1 / 4, last=False)        the last one's gradients travel at once
    run.update()

The gradient is the mean over data-parallel ranks of each rank's accumulated gradients, as with
torch's DDP and other frameworks. This is a mean of means, with the same weights for unequal counts
of targets as there. If all passes come with their counts, these are the weights (design §6). The
passes use the process's own random generators, in the order in which the loop draws from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program, run_sequentially
from shoal.trainer.passes.written_out_passes import missing_loss
from shoal.trainer.step.call_contract import describe_invalid_loss
from shoal.trainer.step.micro_batch import MicroBatch, prepare_batch
from shoal.trainer.step.optimizer_step import (
    StepFlags,
    StepTotals,
    begin_passes,
    reduce_step,
    reducer_of,
)
from shoal.trainer.step.rank_share import RankShare
from shoal.trainer.step.step_vector import Invariant, InvariantGroup
from shoal.wire import phases

PASSES, UNFINISHED = "backward passes", "unfinished passes"


class FreePasses:
    """Forward and backward passes of one step on this rank, in any order.

    Attributes:
        count: backward passes until now.
    """

    spare = None
    """No micro-batch for passes of weight 0: all ranks make the same passes."""

    def __init__(
        self, program: Program, step: int, scale: float, flags: Callable[[], StepFlags]
    ) -> None:
        layout = program.plan.layout
        if program.run is not run_sequentially or max(layout.pp, layout.cp) > 1:
            raise ConfigError(
                f"layout.strategy = {layout.strategy} runs the passes of a step in an order of its "
                f"own, which a loop of its own cannot follow; try: ddp, zero1, zero2 or fsdp"
            )
        self.program, self.step, self.count = replace(program, keyed=None), step, 0
        self._flags, self._scale = flags, scale
        _, self._sums = begin_passes(program, RankShare([]), missing_loss, step, "single", scale)
        self._at: MicroBatch | None = None
        self._sent, self._tally = False, cast("StepTotals | None", None)
        self._weighs = self._whole = False
        self._around = ExitStack()

    @property
    def in_progress(self) -> bool:
        """Return whether a pass has begun whose backward has not run."""
        return self._at is not None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model, in the run's dtype, on the run's device."""
        module = self.program.module
        if module.training and torch.is_grad_enabled():
            self._open_pass()
        inputs, named = prepare_batch(self.program, (inputs, named))
        with self.program.autocast():
            return module(*inputs, **named)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float,
        last: bool,
        retain_graph: bool = False,
        count: torch.Tensor | None = None,
        others: Sequence[FreePasses] = (),
    ) -> None:
        """Run a backward pass of `share` × loss; add its gradients to this rank's.

        Args:
            loss: a scalar.
            share: factor of the loss, such as 1 / (passes of the step).
            last: no pass of this step comes after it, so the all-reduce may start at once.
            retain_graph: as in `torch.Tensor.backward`.
            count: denominator of the loss, a mean. It is the weight of this pass among the passes
                of the step, whose shares then add up to 1 if they are less than 1 each.
            others: passes of other runs whose models may have made the loss, too: a generator's
                and its discriminator's.

        Raises:
            ConfigError: the loss has dims, or no gradient.
        """
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            got = describe_invalid_loss(loss, "loss.mean()")
            raise ConfigError(f"backward: a loss with a gradient is wanted, got {got}")
        if self._sent:
            raise ConfigError(
                "backward: gradients of this step are on their way already, by the pass before, "
                "which was its last one; try: one backward pass of the sum of the losses"
            )
        self._sent = last
        reducer = reducer_of(self.program)
        reducer.prepare_backward(last)
        for other in others:
            reducer_of(other.program).prepare_backward(False)
        if count is None:
            total = self._open_pass().add_to_sums(loss * share, torch.zeros((), device=loss.device))
        else:
            # A mean over nothing is NaN, and has weight 0.
            summed = torch.where(count > 0, loss * count.to(loss), torch.zeros_like(loss))
            total = self._open_pass().add_to_sums(summed, count)
            self._weighs, self._whole = True, share == 1.0
        phases.record_step_part(phases.BACKWARD)
        with torch.autocast(loss.device.type, enabled=False):
            torch.autograd.backward(total, retain_graph=retain_graph)
        phases.record_step_part(phases.PASSES)
        reducer.end_backward(True)
        for other in others:
            reducer_of(other.program).end_backward(True)
        for passes in (self, *others):
            passes.count += 1
            passes._close_pass()

    def finish(self) -> StepTotals:
        """Sum over all ranks, once.

        Raises:
            ConfigError: some rank made fewer passes; on all ranks.
        """
        if self._tally is not None:
            return self._tally
        unfinished = {UNFINISHED: [float(self.in_progress)]}
        self._close_pass()
        flags, world = self._flags(), self.program.world
        own = Invariant(PASSES, self.count, InvariantGroup(range(world.size), world.rank))
        invariants = [*flags.invariants, own]
        flags = replace(flags, sums={**flags.sums, **unfinished}, invariants=invariants)
        tally = reduce_step(self.program, self._sums, self.count, flags)
        if tally.numbers.invariants.differs(PASSES):
            counts = tally.numbers.invariants.by_rank(PASSES)
            few, many = (one(range(len(counts)), key=counts.__getitem__) for one in (min, max))
            raise ConfigError(
                f"step {self.step + 1}: rank {few} made {counts[few]} backward passes and "
                f"rank {many} {counts[many]}; every rank makes as many as any other"
            )
        weight = float(self.program.data.size)
        if self._weighs:  # a loop that divides its losses itself makes passes of share 1
            weight = tally.count / (self.count if self._whole else 1)
        # A model may have run once more on some rank, whose BatchNorm then has one row more.
        uneven = tally.uneven or tally.numbers.sums(UNFINISHED)[0] > 0
        self._tally = replace(tally, count=weight, uneven=uneven)
        return self._tally

    def _open_pass(self) -> MicroBatch:
        if self._at is None:
            data = self.program.data
            index = self.count * data.size + data.rank
            self._at = MicroBatch(
                self.program,
                missing_loss,
                self.step,
                index,
                None,
                "single",
                self._scale,
                self._sums,
            )
            self._around.enter_context(self._at.keyed_context())
        return self._at

    def _close_pass(self) -> None:
        self._at = None
        self._around.close()
