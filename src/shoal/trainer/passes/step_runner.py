"""Run the optimizer steps of a program: micro-batches → passes → sum over ranks → update.

    begin_batch      split the batch into this rank's micro-batches
    run_passes       forward and backward of each; sum gradients, loss and count over all ranks
    accept_sums      let the guards check the sums, before anything is updated
    update_weights   mean gradient, clipping, optimizer step; or a skip, on all ranks

Loops that write the passes out themselves (`written_out_passes.py`, `free_passes.py`) come in
between the first and the second, with the same sum and the same update. `Run` is the user's
interface to this class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.errors import ConfigError
from shoal.data.loading.step_samples import StepBatch
from shoal.machine.process_memory import TRIM_EVERY, trim_grown_heap
from shoal.parallel.program import Program
from shoal.trainer.batches.batch_values import SHARED
from shoal.trainer.guards import RunGuards
from shoal.trainer.guards.call_log import get_call_log, record_forward_calls
from shoal.trainer.guards.external_writes import is_watched
from shoal.trainer.guards.first_step_checks import FirstStepLoss
from shoal.trainer.guards.optimizer_checks import LearningRateSetter, ScheduleLength
from shoal.trainer.loaders.epochs import EpochCounter
from shoal.trainer.loaders.run_loaders import RunLoaders
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.call_contract import Loss
from shoal.trainer.step.optimizer_step import (
    StepFlags,
    StepResult,
    StepTotals,
    as_count,
    forward_backward,
    is_off_host,
    update,
)
from shoal.trainer.step.rank_share import RankShare, build_rank_share, count_unreadable
from shoal.trainer.step.skipped_steps import SkipCounter, SpikeDetector
from shoal.wire import phases

if TYPE_CHECKING:  # what not every run needs is imported where it is
    from shoal.optim.average import WeightAverage
    from shoal.trainer.passes.free_passes import FreePasses
    from shoal.trainer.passes.written_out_passes import UserPasses
    from shoal.trainer.run_folder.run_saves import RunSaver
    from shoal.trainer.statistics.tensor_statistics import TensorStatistics
    from shoal.trainer.step.call_contract import Metric
    from shoal.trainer.step.logged_values import LoggedValues
    from shoal.trainer.step.loss_scale import LossScale
    from shoal.trainer.step.sampled_steps import SampledSteps


@dataclass
class StepState:
    """A step between its first pass and its update.

    Attributes:
        batch: the batch of the step.
        data_wait_s: seconds that the step waited for the batch; of a batch that is not of
            `run.loader`, those since the step before.
        loop_s: the others since the step before: the loop's own code; None: unknown.
        written: passes that the user's loop writes out, until they are summed up.
        tally: totals over all ranks, after the passes.
        values: means by name, for the step's result.
    """

    batch: Any = None
    data_wait_s: float = 0.0
    loop_s: float | None = None
    written: UserPasses | FreePasses | None = None
    tally: StepTotals | None = None
    values: dict[str, float] = field(default_factory=dict)


class StepRunner:
    """Runner of the steps of one program; arguments as in `Run`.

    Attributes:
        step_count: optimizer steps taken so far, skipped ones included.
        step_state: state of the current step.
        spare: a micro-batch with finite numbers, for passes of weight 0.
        adjust: changes the final mean gradient.
        lr_step: the step that sets the learning rate, if it is not `step_count`.
        first_key: added to the indices of micro-batches, which are keys of random generators.
        coupled: the loss couples the samples of a micro-batch on purpose.
        stopping: some rank requested a stop, and all ranks know it.
        stop_wanted: this rank requested a stop.
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        recorder: MetricsRecorder,
        length: ScheduleLength,
        given: Collection[str] = (),
        unheld: tuple[Collection[str], Collection[str]] = ((), ()),
    ) -> None:
        plan = program.plan
        self.recorder, self.optimizer, self.loss = recorder, optimizer, loss
        self.step_count = self.first_key = 0
        self.coupled = False
        self.step_state, self.spare = StepState(), None
        self.feed = RunLoaders(
            plan, program.data, recorder.notice, recorder.emit_rank_notice, given
        )
        self.cut = plan.micro_batch if "micro_batch" in given else 0  # for the user's own batches
        self.adjust: Callable[[], None] | None = None
        self.lr_step: int | None = None
        self.metrics: Mapping[str, Metric] = {}
        self._measured: LoggedValues | None = None
        self.loss_scale: LossScale | None = None
        if plan.compute == "fp16":
            from shoal.trainer.step.loss_scale import LossScale

            self.loss_scale = LossScale(plan.loss_scale)
        self.average: WeightAverage | None = None
        if plan.average:
            from shoal.optim.average import WeightAverage

            stepped = {name: one.parameter for name, one in program.local.items()}
            self.average = WeightAverage(plan.average, stepped)
        self.stopping = self.stop_wanted = False
        self._saving: RunSaver | None = None
        self.skips, self.spikes = (
            SkipCounter(plan.skip_limit, plan.unreadable),
            SpikeDetector(plan.spikes),
        )
        self.rate = LearningRateSetter(optimizer, length)
        if program.owed is not None:  # the early int8 steps may be a share of the length
            program.owed.sums.length = length
        self.epochs_done = EpochCounter(self.feed)
        self.sampled: SampledSteps | None = None
        if recorder.folder is not None:
            from shoal.trainer.step.sampled_steps import sample_steps

            self.sampled, program = sample_steps(program)
        self.statistics: TensorStatistics | None = None
        if recorder.folder is not None and plan.statistics:
            from shoal.trainer.statistics.tensor_statistics import record_statistics

            self.statistics, program = record_statistics(program)
        if recorder.trace is not None:
            program = recorder.trace.mark_ranges(program)
        self.meeting = get_call_log(program.world)
        self.meeting.open_run()
        self.guards = RunGuards(
            program,
            optimizer,
            recorder,
            self.average,
            given,
            unheld,
            self.meeting.is_equal_on_ranks,
        )
        self.guards.batches.loss = loss
        self.program = program = record_forward_calls(program, self.meeting)
        if program.cuts or program.pipe.size > 1 or program.plan.layout.zero == 3:
            from shoal.trainer.guards.user_weights import UserWeights

            weights = UserWeights(program, self.meeting, self.guards.findings.notice)
            self.program = replace(program, on_close=(*program.on_close, weights.close))
            self.guards.writes.operands = lambda: weights.operands
            self.meeting.add_view(weights)
        self.guards.watch_loss(program, loss)
        recorder.emit_notices(self.program.notices)

    @property
    def checkpoint_saver(self) -> RunSaver:
        """Return the writer of this run's checkpoints; made at first use."""
        if self._saving is None:
            from shoal.trainer.run_folder.run_saves import (
                RunSaver,  # imported only if the run saves
            )

            self._saving = RunSaver(
                self.program.world, self.recorder.events.emit, self.recorder.warn
            )
        return self._saving

    @property
    def scale(self) -> float:
        """Return the factor of the loss before backward."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def begin_step(self, batch: Any, *, is_own: bool = True) -> None:
        """Begin a step; its state is new.

        Args:
            batch: the batch of the step; None: the user's loop calls the model itself.
            is_own: False: this rank runs no pass on this batch, other ranks do.

        Raises:
            ConfigError: the step before has no update yet.
        """
        if self.step_state.tally is not None and self.step_state.written is None:
            raise ConfigError(
                "run.forward_backward was called twice without run.update between; give all "
                "micro-batches of one optimizer step in one batch"
            )
        if self.meeting.in_passes and self.step_state.written is not None:
            raise ConfigError(
                "run.step was called inside of the loop over run.micro_batches, which is a step "
                "already; try: run.backward(loss_sum, count) there, and run.update() after the loop"
            )
        step = self.step_count + 1
        self.step_state = state = StepState(batch, self.recorder.start_step(step))
        if isinstance(batch, StepBatch) and batch.wait_s is not None:
            between_s, state.data_wait_s = state.data_wait_s, min(batch.wait_s, state.data_wait_s)
            state.loop_s = between_s - state.data_wait_s
            if phases.page is not None:
                phases.page.record_loop_time(state.loop_s)
        if self.sampled is not None:
            self.sampled.begin_step(step)
        if self.statistics is not None:
            self.statistics.begin_step(step)
        for guard in self.guards.at("before", step):
            guard.before(step, batch if is_own else None)

    def begin_batch(self, batch: Any) -> RankShare:
        """Begin a step on a batch, and return this rank's share of it."""
        world = self.program.world
        if world.size > 1 == self.program.data.size and not isinstance(batch, StepBatch):
            self.meeting.record_batch_form(batch)
        self.begin_step(batch)
        known = self.guards.batches.readings
        return build_rank_share(self.program, batch, self.cut, self.first_key, self.spare, known)

    def run_passes(self, batch: Any) -> None:
        """Run the passes of a step, and sum gradients, loss and count over all ranks."""
        share = self.begin_batch(batch)
        seen = self.guards.optimizer.state_checked
        first = None
        if not seen:
            proven = SHARED in self.guards.batches.readings.values()  # by a trial of the loss
            first = FirstStepLoss(
                self.loss, self.program, share.micro_batches, coupled=self.coupled or proven
            )
        with self.guards.around(self.step_count + 1, len(share.micro_batches)):
            tally = forward_backward(
                self.program,
                share,
                first or self.loss,
                step=self.step_count,
                scale=self.scale,
                call=self.program.plan.call,
                flags=self.collect_flags,
                note=self._record_loss,
            )
        self.accept_sums(tally, share.spare)
        if first is not None:
            pipe, data = self.program.pipe, self.program.data
            last = pipe.rank > 0 == data.rank == self.program.tensor.rank  # it alone has losses
            findings = self.guards.findings
            first.foreign = [one for one in first.foreign or () if not is_watched(one)]
            first.print_notices(findings.emit_rank_notice if last else findings.notice)

    def collect_flags(self) -> StepFlags:
        """Return the values that this rank adds to the step's all-reduce after its passes."""
        step, measured = self.step_count + 1, self._measured
        return StepFlags(
            step=step,
            stop=self.stop_wanted or "stop" in self.recorder.wanted,
            save="save" in self.recorder.wanted,
            save_failed=self._saving is not None and self._saving.failed(),
            sums={
                "unreadable": [count_unreadable(self.step_state.batch)],
                **self.guards.sums(step),
            },
            invariants=self.guards.invariants(step),
            measured=measured.to_vector() if measured else None,
            unnamed=measured is not None and measured.has_new_names,
        )

    def accept_sums(self, tally: StepTotals, spare: Any) -> None:
        """Let the guards check the totals of a step, before its update.

        Args:
            tally: the totals over all ranks.
            spare: a micro-batch of this step.

        Raises:
            ShoalError: the finding of a guard, the same on all ranks.
        """
        self.step_state.tally = tally
        for guard in self.guards.at("agree", self.step_count + 1):
            guard.agree(self.step_count + 1, tally.numbers)
        if tally.unnamed or self._measured is not None:
            self.step_state.values = self.metric_sums().values(tally.measured, tally.unnamed)
        if self.sampled is not None:
            self.sampled.end_step(self.recorder)
        if self.statistics is not None and self.statistics.is_due:
            self.statistics.end_passes(tally, self.scale)
        if not tally.broken:
            self.spare = spare  # for a later step in which this rank has no batch
        self.stopping = tally.stop
        if tally.save_failed:
            self.checkpoint_saver.wait_pending()  # on all ranks; reports the save's error

    def open_gradients(self, call: str) -> None:
        """Make `.grad` the step's mean gradient, which user code may change before the update.

        Args:
            call: the call that ended the passes, for errors.
        """
        from shoal.trainer.step.whole_gradients import average_gradients

        if (tally := self.step_state.tally) is not None:
            self.step_state.tally = average_gradients(self.program, tally, self.scale)
        self.guards.writes.after(call=call)

    def accept_changes(self, *, compare: bool) -> None:
        """Check what user code did to the mean gradient, before the update.

        Args:
            compare: compare the gradients of all ranks, and take their norm anew.

        Raises:
            ConfigError: gradients were removed, or changed differently by ranks.
        """
        # Nothing is left of a step that a guard refuses.
        state, self.step_state = self.step_state, StepState()
        step = self.step_count + 1
        for guard in self.guards.at("between", step):
            guard.between(step)
        if compare and state.tally is not None and state.tally.averaged and self.guards.on:
            from shoal.trainer.guards.gradient_passes import compare_changes

            changed = self.guards.writes.changed_gradients
            state.tally = replace(
                state.tally,
                norm_now=compare_changes(
                    self.program, step, changed, self.guards.writes.operands()
                ),
            )
        self.step_state = state

    def update_weights(self) -> StepResult:
        """Step the optimizer by the mean gradient, or skip the update, on all ranks."""
        state, self.step_state = self.step_state, StepState()
        if (tally := state.tally) is None:
            raise ConfigError("run.update was called before run.forward_backward")
        step = self.step_count + 1
        for guard in self.guards.at("updating", step):
            guard.updating(step)
        if self.optimizer is not self.guards.writes.optimizer:
            self.guards.writes.check_optimizer(self.optimizer)
        lr = self.rate.set(self.step_count if self.lr_step is None else self.lr_step)
        statistics = self.statistics
        if statistics is not None and statistics.is_due:
            statistics.before_update()
        with self.guards.writes.mark_own_step():
            done = update(
                self.program,
                self.optimizer,
                tally,
                clip=self.program.plan.clip,
                scale=self.scale,
                watch=self.guards.optimizer.pre_step_check,
                adjust=self.adjust,
                spikes=self.spikes,
            )
        self.recorder.emit_notices(self.program.notices)
        if statistics is not None and statistics.is_due:
            statistics.after_update(step, self.recorder)
        if self.average is not None and not done.skipped:
            self.average.update()
        for guard in self.guards.at("updated", step):
            guard.updated(step, skipped=done.skipped)
        self.step_count, self.epochs_done.steps = step, self.epochs_done.steps + 1
        if isinstance(state.batch, StepBatch):
            self.feed.mark_consumed(state.batch)
        targets = as_count(tally.count)
        result = StepResult(step=step, lr=lr, targets=targets, metrics=state.values, **vars(done))
        if self.recorder.has_readers:
            from shoal.trainer.step.metrics_rows import build_row, write_row

            extras = {"loss_scale": self.loss_scale.value} if self.loss_scale else {}
            extras |= {} if state.loop_s is None else {"loop_s": state.loop_s}
            row = build_row(result, tally, state.batch, state.data_wait_s, extras)
            write_row(self.recorder, *row)
        else:
            self.recorder.end_step_without_row(step)
        if step % TRIM_EVERY == 0 and not is_off_host(self.program.world.device):
            trim_grown_heap()
        self.skips.record_step(step, done, tally, state.batch, self.loss_scale, self.recorder)
        return result

    def metric_sums(self) -> LoggedValues:
        """Return the sums of metrics by name; made at first use."""
        if self._measured is None:
            from shoal.trainer.step.logged_values import LoggedValues

            self._measured = LoggedValues(self.program, self.metrics)
        return self._measured

    def _record_loss(self, result: Any, outputs: Any, targets: Any) -> None:
        if self.metrics or (isinstance(result, tuple) and len(result) == 3):
            self.metric_sums().add(result, outputs, targets)
