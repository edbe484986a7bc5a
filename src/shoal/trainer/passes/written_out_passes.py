"""Passes of one step in a user's own loop: the user runs forward and loss, Shoal sums.

    for micro in run.micro_batches(batch):          keys of randomness, autocast, no sum travels yet
        run.backward(loss_sum, count)               once or more, equally often in all of them
    …                                               gradients, loss and count are summed over ranks
    run.update()                                    after the user's own work on the mean gradient

Several losses of a micro-batch share one count. A loss with another denominator is divided by that
of the whole step first (`run.total`), and so are then the others: none comes with a count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.fabric.device import is_accelerator
from shoal.parallel.program import Program, run_sequentially
from shoal.trainer.backward_errors import raise_named_error
from shoal.trainer.guards.first_step_checks import watch_double_backward
from shoal.trainer.guards.gradient_passes import PassGradients
from shoal.trainer.step.call_contract import describe_invalid_loss, sum_and_count
from shoal.trainer.step.logged_values import LoggedValues
from shoal.trainer.step.micro_batch import (
    JOINING,
    JOINING_PASS,
    MicroBatch,
    combine_contexts,
    prepare_batch,
)
from shoal.trainer.step.optimizer_step import (
    StepFlags,
    StepTotals,
    begin_passes,
    reduce_step,
    reducer_of,
)
from shoal.trainer.step.rank_share import RankShare
from shoal.trainer.step.step_vector import Invariant, StepNumbers

if TYPE_CHECKING:  # the first step's alone
    from shoal.trainer.guards.pass_checks import PassChecks
    from shoal.trainer.guards.pass_trial import PassTrial


@dataclass(frozen=True)
class UserMicroBatch:
    """A micro-batch for the user's loop, on its device and in its dtype.

    Attributes:
        inputs, targets: as the dataset returned them. If the batch is no pair (a dict, a tensor,
            three of them), both are the whole batch.
        index: its index in the step, over all ranks. Negative: the pass only takes part in the
            collectives of other ranks, and its losses have weight 0.
    """

    inputs: Any
    targets: Any
    index: int


class UserPasses:
    """The micro-batches of one step on this rank, and the backward passes of each.

    Args:
        program: the run's.
        share: this rank's micro-batches.
        step: the step's number, a key of its random generators.
        scale: factor of the losses before backward.
        flags: returns this rank's `StepFlags`, after its passes.
        graded: parameters whose gradients are checked for foreign writes.
        notice: prints a line of this rank; None: the run's first step is over.
        trial: prints a line of this rank's trial, once in a run; None: losses are not tried.
        coupled: samples of a micro-batch are compared on purpose.
        groups: of the optimizer.
        joining: called with a line before a pass of weight 0, which keeps ranks together.

    Attributes:
        spare: a micro-batch with finite numbers.
    """

    def __init__(
        self,
        program: Program,
        share: RankShare,
        *,
        step: int,
        scale: float,
        flags: Callable[[], StepFlags],
        graded: Sequence[nn.Parameter],
        notice: Callable[[str], None] | None,
        trial: Callable[[str], None] | None = None,
        coupled: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
        joining: Callable[[str], None] = lambda line: None,
    ) -> None:
        if program.run is not run_sequentially:
            raise ConfigError(
                f"run.micro_batches: layout.strategy = {program.plan.layout.strategy} runs the "
                f"passes of a step in an order of its own; try: run.step(batch), with the loss "
                f"given to shoal.parallelize"
            )
        if program.plan.offloads_parameters and not program.together:
            raise ConfigError(
                "run.micro_batches: memory.offload = parameters brings weights for one backward "
                "pass of each micro-batch; try: run.step(batch), or memory.offload=optimizer"
            )
        self.program, self.spare, self.step = program, share.spare, step
        self._flags = flags
        self._own = len(share.micro_batches)
        self._rounds = max(share.rounds, self._own)
        self._ready, self._sums = begin_passes(program, share, missing_loss, step, "single", scale)
        self._gradients = PassGradients(program, graded, step + 1, scale)
        self._at: MicroBatch | None = None
        self._count: torch.Tensor | None = None
        self._unequal: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls: list[int] = []
        self._counts: set[bool] = set()
        self._joining = joining
        self._checks: PassChecks | None = None
        self._trial: PassTrial | None = None
        self._watched: Callable[[UserMicroBatch], AbstractContextManager[Any]] = nullcontext
        passes = self._rounds * program.data.size
        if notice is not None:
            from shoal.trainer.guards.pass_checks import PassChecks

            self._checks = PassChecks(
                program, notice, trial or notice, passes=passes, coupled=coupled, groups=groups
            )
        if trial is not None and step < TRIED_STEPS and passes > 1 and not coupled:
            from shoal.trainer.guards.pass_trial import try_passes

            self._trial = try_passes(program, trial, passes)
        if self._checks is not None or self._trial is not None:
            self._watched = self._follow

    def _follow(self, one: UserMicroBatch) -> AbstractContextManager[None]:
        """Return the checks' and the trial's context around the loop's work on a micro-batch."""
        trial = None if one.index == JOINING else self._trial
        return combine_contexts(
            None if self._checks is None else self._checks.follow(one.targets),
            None if trial is None else trial.follow(one.inputs, one.targets),
        )

    def run(self) -> Generator[UserMicroBatch, None, None]:
        """Yield one micro-batch after another; backward calls in between belong to it."""
        reducer = reducer_of(self.program)
        for one in self._ready:
            reducer.prepare_backward(last=False, once=False)
            self._at, self._count = one, None
            self._calls.append(0)
            with (
                one.keyed_context(),
                self.program.autocast(),
                watch_double_backward(self.program),
            ):
                batch = prepare_batch(self.program, one.batch)
                pair = isinstance(batch, tuple | list) and len(batch) == 2
                inputs, targets = batch if pair else (batch, batch)
                if one.index == JOINING:
                    self._joining(JOINING_PASS)
                micro: Any = UserMicroBatch(inputs, targets, one.index)
                with self._watched(micro):
                    yield micro
            # Free the inputs of finished passes.
            self._at = batch = inputs = targets = micro = None
            self._gradients.check()
            reducer.end_backward(one.index != JOINING)
            self._gradients.record_marks()  # under zero2 sums of parts were added

    def log(self, measuring: Callable[[], LoggedValues], values: Mapping[str, Any]) -> None:
        """Add named sums and counts, as `Run.log` does."""
        if self._at is None:
            raise ConfigError(
                "run.log: no micro-batch is at hand; call it inside of the loop over "
                "run.micro_batches(batch)"
            )
        for name, value in values.items():
            if not isinstance(value, tuple) or len(value) != 2:
                raise ConfigError(
                    f"run.log: {name} is {type(value).__name__}, (sum, count) is wanted, over this "
                    f"micro-batch; try: {name}=(value * n, n)"
                )
            if self._at.index != JOINING:
                measuring().add_value(name, *value, where="run.log")

    def backward(self, loss: torch.Tensor, count: Any, *, retain_graph: bool) -> None:
        """Run a backward pass, as `Run.backward` does."""
        one = self._at
        if one is None:
            raise ConfigError(
                "run.backward: no micro-batch is at hand; call it inside of the loop over "
                "run.micro_batches(batch), once for each loss"
            )
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise ConfigError(
                f"run.backward: a sum with a gradient is wanted, got "
                f"{describe_invalid_loss(loss, 'loss.sum()')}"
            )
        if self._trial is None:
            self._run_backward(one, loss, count, retain_graph)
            return
        with self._trial.judge(loss):
            self._run_backward(one, loss, count, retain_graph)

    def _run_backward(
        self, one: MicroBatch, loss: torch.Tensor, count: Any, retain_graph: bool
    ) -> None:
        if self._checks is not None:
            self._checks.check(one.index, loss, count, self._calls[-1])
        total = one.add_to_sums(loss, self._count_once(loss, count))
        self._calls[-1] += 1
        reducer = reducer_of(self.program)
        with (
            self._gradients.backward(reducer, self._rounds, counted=count is not None),
            torch.autocast(loss.device.type, enabled=False),
        ):
            try:
                total.backward(retain_graph=retain_graph)
            except RuntimeError as error:
                raise_named_error(error)
                raise

    def _count_once(self, loss: torch.Tensor, count: Any) -> torch.Tensor:
        """Return the addend of a call to the step's count: 0 after the first call of a micro-batch.

        Nothing is read from a device, since the host would wait for it.
        """
        _, said = sum_and_count((loss, 0 if count is None else count), None, "run.backward")
        if not self._calls[-1]:
            self._counts.add(count is not None)
            self._count = None if count is None else said
            return said
        if count is not None and self._count is None:
            raise ConfigError(
                "run.backward: the first loss of a micro-batch came without a count and the second "
                "with one; try: the count with the first"
            )
        if count is not None and self._count is not None:
            self._unequal.append((self._count, said))
            if not is_accelerator(said.device):
                self._compare_counts()
        return torch.zeros_like(said)

    def _compare_counts(self) -> None:
        """Raise ConfigError for two counts in one micro-batch."""
        told, self._unequal = self._unequal, []
        for first, other in told:
            if float(first) != float(other):
                raise ConfigError(
                    f"run.backward: counts {float(first):g} and {float(other):g} in one "
                    f"micro-batch, whose losses share one; try: divide each sum by its "
                    f"run.total(n) of the whole step, and give no count"
                )

    def finish(self) -> StepTotals:
        """Sum over all ranks, and compare their numbers of calls.

        Raises:
            ConfigError: the calls differ, on all ranks; or user code changed gradients, on its
                rank.
        """
        if self._at is not None or len(self._calls) < len(self._ready):
            raise ConfigError(
                f"run.update: {len(self._calls)} of {len(self._ready)} micro-batches were taken "
                f"from run.micro_batches; take all of them, whatever becomes of their losses"
            )
        self._gradients.close()
        for check in (self._checks, self._trial):
            if check is not None:
                check.close()
        calls = self._calls
        passes = {
            "backward_calls": [float(sum(c**power for c in calls)) for power in range(3)],
            "counts": [float(True in self._counts), float(False in self._counts)],
        }
        told = Invariant(CALLS, [min(calls), max(calls)] if calls else [], None)
        flags = self._flags()
        flags = replace(flags, sums={**flags.sums, **passes}, invariants=[*flags.invariants, told])
        tally = reduce_step(self.program, self._sums, self._own, flags)
        self._compare_counts()  # the host has waited for the step already
        self._gradients.compare()
        self._compare_calls(tally.numbers)
        whole, bare = (some > 0 for some in tally.numbers.sums("counts"))
        if whole and bare:
            raise ConfigError(
                f"run.backward: some losses of step {self.step + 1} came with a count and some "
                f"without; try: one of both everywhere"
            )
        return tally if whole else replace(tally, count=1.0)

    def _compare_calls(self, numbers: StepNumbers) -> None:
        """Raise ConfigError if micro-batches, on any rank, had unequal backward passes."""
        micro_batches, calls, squares = numbers.sums("backward_calls")
        if calls and micro_batches * squares == calls * calls:
            return  # as many in every micro-batch
        if not calls:
            raise ConfigError(
                f"run.update: run.backward was not called in step {self.step + 1}; try: "
                f"run.backward(loss_sum, count) in the loop over run.micro_batches(batch)"
            )
        told = numbers.invariants.by_rank(CALLS)
        ranks = [rank for rank, one in enumerate(told) if one]
        low = min(ranks, key=lambda rank: told[rank][0])
        high = max(ranks, key=lambda rank: told[rank][1])
        few, many = told[low][0], told[high][1]
        raise ConfigError(
            f"run.backward: called {few} times in a micro-batch of rank {low} and {many} times "
            f"in one of rank {high}, in step {self.step + 1}; call it equally often in every "
            f"micro-batch, on every rank"
        )


TRIED_STEPS = 3
"""First steps in which losses are tried (`guards/pass_trial.py`)."""
CALLS = "fewest and most backward calls"
"""Name of the counts that ranks gather when their backward passes differ."""


def missing_loss(_outputs: Any, _targets: Any) -> Any:
    """Stand in for a loss if the user's loop computes its own."""
    return math.nan
