"""A run: the user's model, optimizer and loss, prepared for all processes of the job.

`parallelize` builds the plan and the program; `Run.step` is one optimizer step. The main job of
`shoal train` uses this file like any other loop.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.plans.plan import Plan
from shoal.base.standard_streams import write_output
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.argument_checks import OF_A_LOADER, refuse_unknown
from shoal.trainer.guards.call_log import collective_call
from shoal.trainer.guards.optimizer_checks import ScheduleLength
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.passes.step_runner import StepRunner, StepState
from shoal.trainer.step.call_contract import Loss
from shoal.trainer.step.optimizer_step import StepResult, reducer_of

if TYPE_CHECKING:  # what not every run needs is imported where it is
    from torch.distributed.device_mesh import DeviceMesh

    from shoal.checkpoint.format.lease import RunLease
    from shoal.data.loading.iterable import IterableLoader
    from shoal.data.loading.loader import Loader
    from shoal.trainer.guards.tokenizer_match import TokenizerCheck
    from shoal.trainer.passes.source_losses import SourceLoss
    from shoal.trainer.passes.written_out_passes import UserMicroBatch, UserPasses
    from shoal.trainer.state.run_state import ExtraState
    from shoal.trainer.step.call_contract import Metric
    from shoal.trainer.step.whole_gradients import WholeGradients


class Run(StepRunner):
    """One model in training, with its optimizer and its process groups; a process may have several.

    `shoal.parallelize` makes it. `step_count` is the number of optimizer steps taken so far,
    skipped ones included.

    Args:
        given: which of `batch` and `micro_batch` the user set; the run checks the user's own
            batches against them.

    Attributes:
        model: the module, on its device.
        world: the processes.
        plan: the settled plan.
        extra_state: further tensors that checkpoints keep.
        extra: what the last `save` stored as `extra`, or the restored checkpoint.
        validated_by_source: loss and targets by source, if `evaluate` last read a mixture.
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
        super().__init__(program, optimizer, loss, recorder, length, given, unheld)
        self.extra_state: ExtraState | None = None
        self.extra: dict[str, Any] = {}
        self.extra_record: dict[str, Any] = {}
        self.tokenizer: Any = None
        self.tokenizer_check: TokenizerCheck | None = None
        self.tells_validation = True
        self.validated_by_source: dict[str, SourceLoss] = {}
        self._closed = False
        self._print_once = functools.cache(self.guards.findings.emit_rank_notice)
        self.lease: RunLease | None = None
        self._restored: set[Path] = set()
        if program.plan.layout.zero or program.pipe.size > 1:
            from shoal.trainer.guards.state_by_weight import watch_state

            watch_state(program, optimizer, self.guards.findings.notice)

    def add_callback(self, *hooks: Callable[[dict[str, Any]], Any]) -> None:
        """Register callbacks for every event and every step's row from now on, in this process.

        Args:
            hooks: if one returns "stop" or "save", all ranks do it after the next step.
        """
        for hook in hooks:
            self.recorder.add_callback(hook)

    def hear(self, *hooks: Callable[[dict[str, Any]], Any]) -> None:
        """Call `add_callback`, the name since 0.2; this one goes in 0.3.

        Args:
            hooks: as in `add_callback`.
        """
        warnings.warn("run.hear is run.add_callback since 0.2", DeprecationWarning, stacklevel=2)
        self.add_callback(*hooks)

    @property
    def model(self) -> nn.Module:
        """Return the module that trains."""
        return self.program.module

    @property
    def world(self) -> World:
        """Return the processes of this run."""
        return self.program.world

    @property
    def rank(self) -> int:
        """Return this process's rank in the run, of `world.size` ranks."""
        return self.world.rank

    @property
    def plan(self) -> Plan:
        """Return the plan: the layout, the batch arithmetic and the gradient buckets."""
        return self.program.plan

    def loader(
        self, dataset: Any, *, workers: int = 0, collate: Any = None, **unknown: Any
    ) -> Loader | IterableLoader:
        """Return a loader over a dataset in this run's order; each rank gets its own micro-batches.

        After `restore`, the first loader resumes where the checkpoint was written. The same
        dataset, or a new one of the same samples, continues with the stream's next epoch. Other
        arguments of a DataLoader raise an error that says where Shoal takes them.

        Args:
            dataset: map-style (`__getitem__`, `__len__`) or an iterable with `state_dict()`, the
                same on every rank.
            workers: processes that read samples; 0: this process.
            collate: joins samples to a batch.

        Returns:
            An iterable over the steps of one epoch; iterating again is the next epoch.

        Raises:
            ConfigError: an unknown argument.
        """
        refuse_unknown(self.loader, unknown, OF_A_LOADER)
        return self.feed.open(dataset, workers, collate)

    @property
    def epoch(self) -> int:
        """Return the number of finished epochs; counted by `epochs`, else by the first loader."""
        return self.epochs_done.current

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of `count`, from 0; fewer after a `restore`.

        One iteration of the loop is an epoch. A checkpoint from the middle of an epoch resumes
        there.

        Args:
            count: epochs of the whole run, those before a `restore` among them.
        """
        return self.epochs_done.iter_epochs(count, lambda: self.stopping, self.recorder.warn)

    @collective_call("run.step")
    def step(self, batch: Any) -> StepResult:
        """Run forward, backward, clipping and update of one optimizer step.

        Args:
            batch: a batch of `run.loader`, or this rank's own share of the step's samples, (inputs,
                targets) or one dict.

        Raises:
            ConfigError: the loss returns a mean.
            TrainingError: too many non-finite steps in a row.
        """
        self.run_passes(batch)
        return self.update_weights()

    def steps(self, data: Any, *, workers: int = 0, collate: Any = None) -> Iterator[StepResult]:
        """Run `step` over one epoch of a dataset, split over ranks, or of this rank's batches.

        Args:
            data: a dataset, or an iterable of this rank's own batches.
            workers: processes that load samples of a dataset; 0: none.
            collate: list of samples → a batch; default: torch's.

        Raises:
            ConfigError: as in `step`; or a DataLoader shows every rank the whole dataset.
            TrainingError: as in `step`.
        """
        for batch in self.feed.training_batches(data, workers, collate):
            yield self.step(batch)

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True
    ) -> None:
        """Print a line on standard output, from rank 0 alone, at once.

        Args:
            values: as of the built-in `print`.
            sep: between values.
            end: after them.
            file: a stream; None: standard output.
            flush: is accepted; every line is written at once.
        """
        if self.world.is_first:
            write_output(sep.join(map(str, values)), end, file)

    @collective_call("run.forward_backward")
    def forward_backward(self, batch: Any) -> None:
        """Run the first half of `step`: then `.grad` is the step's mean gradient, over all ranks.

        It is whole under ddp, and this rank's part under other layouts: `clip_grad_norm_` is right
        on all of them. With `clip=…` of `shoal.parallelize` it is clipped already.

        Args:
            batch: as in `step`.
        """
        self.run_passes(batch)
        self.open_gradients("run.forward_backward")

    def micro_batches(self, batch: Any) -> Iterator[UserMicroBatch]:
        """Yield the micro-batches of one optimizer step, for a loop that runs the model itself.

            for micro in run.micro_batches(batch):
                outputs = run.model(micro.inputs)
                run.backward(loss_sum(outputs, micro.targets), count)
            run.update()

        After the loop `.grad` is the step's mean gradient, as after `forward_backward`. A loop that
        is left without `update` drops the step.

        Args:
            batch: as `step` takes it.

        Raises:
            ConfigError: the layout runs passes in an order of its own (pp).
        """
        from shoal.trainer.passes.written_out_passes import UserPasses

        with self.meeting.at("run.micro_batches"):
            share = self.begin_batch(batch)
            self.step_state.written = own = UserPasses(
                self.program,
                share,
                step=self.step_count,
                scale=self.scale,
                flags=self.collect_flags,
                graded=self.guards.writes.checked_parameters,
                notice=None
                if self.guards.optimizer.state_checked
                else self.guards.findings.emit_rank_notice,
                trial=self._print_once if self.guards.on else None,
                coupled=self.coupled,
                groups=self.optimizer.param_groups,
                joining=self._print_once,
            )
        # Where every pass gathers parameters all ranks make the same calls.
        around = self.guards.around(self.step_count + 1, len(share.micro_batches))
        with self.meeting.record_passes(alike=self.program.together), around:
            yield from self.meeting.record_each("run.micro_batches", own.run())
            # Before the guards' own messages: ranks with fewer passes owe collectives.
            with self.meeting.hide_views():
                tally = own.finish()
        with self.meeting.at("run.micro_batches"):
            self.accept_sums(tally, own.spare)
            self.open_gradients("run.micro_batches")

    @collective_call("run.backward")
    def backward(
        self, loss: torch.Tensor, count: Any = None, *, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of a loss of the current micro-batch, and accumulate its gradients.

        Args:
            loss: a scalar: a sum over targets, which `update` divides by the count of all ranks.
            count: number of those targets; pass it once per micro-batch, for any number of losses.
                None: the loss is a share of the step's mean already, as a sum divided by
                `run.total(n)`.
            retain_graph: as in `torch.Tensor.backward`.

        Raises:
            ConfigError: outside of `micro_batches`; for a loss without a gradient, or with dims;
                for a mean with a count, and for two counts in one micro-batch.
        """
        self._require_user_passes("backward", "run.step(batch)").backward(
            loss, count, retain_graph=retain_graph
        )

    @collective_call("run.total")
    def total(self, count: Any) -> float:
        """Sum a count over all ranks that have samples of their own: a step's denominator.

        Args:
            count: a number, or a tensor of one element: this rank's own.

        Returns:
            The sum over ranks.
        """
        own = torch.as_tensor(count, dtype=torch.float64).reshape(1).to(self.world.device)
        self.program.data.all_reduce(own)
        return float(own)

    def log(self, **values: tuple[Any, Any]) -> None:
        """Add (sum, count) by names to the step's metrics, in a loop over `micro_batches`.

        Args:
            values: name → (sum, count) of this rank's micro-batch; reported is sum / count of all.
        """
        self._require_user_passes("log", "shoal.parallelize(…, metrics={…})").log(
            self.metric_sums, values
        )

    def _require_user_passes(self, name: str, near: str) -> UserPasses:
        from shoal.trainer.passes.written_out_passes import UserPasses

        if not isinstance(self.step_state.written, UserPasses):
            raise ConfigError(f"run.{name} is for loops over run.micro_batches(batch); try: {near}")
        return self.step_state.written

    def begin_step(self, batch: Any, *, is_own: bool = True) -> None:
        """Begin a step, after a check of the run folder; arguments as in `StepRunner.begin`.

        Args:
            batch: the batch of this rank for the step.
            is_own: the user made the batch; False: `run.loader` did.
        """
        if self._closed:
            raise ConfigError("run.step was called after run.close; close a run last")
        self.check_folder()
        super().begin_step(batch, is_own=is_own)

    def check_folder(self) -> None:
        """Refuse a run folder with checkpoints that were not restored; once, on all ranks."""
        if (folder := self.recorder.folder) is not None and folder not in self._restored:
            from shoal.trainer.run_folder.folder_lease import refuse_old_checkpoints

            refuse_old_checkpoints(folder, self.world, self.plan.remote)
            self._restored.add(folder)

    def update_weights(self) -> StepResult:
        """Step the optimizer, and save if some rank requested it."""
        saves = self.step_state.tally is not None and self.step_state.tally.save
        result = super().update_weights()
        if saves:
            self.recorder.wanted.discard("save")
            self.save(wait=False)
        return result

    @collective_call("run.update")
    def update(self) -> StepResult:
        """Run the second half of `step`: clipping and optimizer step, or a skip on all ranks."""
        written, state = self.step_state.written, self.step_state
        if written is not None and state.tally is None:
            state.written = None
            self.accept_sums(written.finish(), written.spare)
        elif state.tally is not None:
            self.accept_changes(compare=written is not None)
        return self.update_weights()

    @collective_call("run.clip_grad_norm_")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the step's mean gradient by its norm over all parts on all ranks.

        Call it between the passes and `update`, on every rank.
        `torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)` is the same there.

        Args:
            max_norm: largest norm; inf: return the norm alone.
            norm_type: p of the p-norm; inf: the largest absolute value.

        Returns:
            The norm before clipping, equal on all ranks.

        Raises:
            ConfigError: no gradients are at hand.
        """
        whole = self._mean_gradients("clip_grad_norm_")
        names = list(self.program.local)
        norm = whole.total_norm(names, norm_type)
        if max_norm != float("inf"):
            whole.scale(names, max_norm, norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the step's mean gradient to [−clip_value, clip_value].

        Args:
            clip_value: the largest absolute value.

        Raises:
            ConfigError: no gradients are at hand.
        """
        self._mean_gradients("clip_grad_value_").clip_value(list(self.program.local), clip_value)

    def _mean_gradients(self, name: str) -> WholeGradients:
        from shoal.trainer.step.whole_gradients import WholeGradients

        if self.step_state.tally is None:
            raise ConfigError(
                f"run.{name}: no gradients are at hand; call it between run.forward_backward, or "
                f"the loop over run.micro_batches, and run.update; try: clip=… of shoal.parallelize"
            )
        return WholeGradients(self.program)

    @collective_call("run.evaluate")
    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Metric] | None = None,
        *,
        workers: int = 0,
        collate: Any = None,
        stops: bool = False,
    ) -> dict[str, float]:
        """Return means of the loss and of metrics over every sample once; all ranks call it.

        Args:
            data: a dataset (split over ranks here), or an iterable of this rank's own batches.
            metrics: name → function(outputs, targets) giving (sum, count) or unreduced values;
                None: those of `parallelize`.
            workers, collate: as in `loader`.
            stops: end early after a call of `request_stop`; then `run.stopping` is true.

        Returns:
            {"loss": …, NAME: …, "targets": count}, equal on all ranks; {} after a stop.
        """
        from shoal.trainer.passes.evaluate import evaluate

        metrics = self.metrics if metrics is None else metrics
        batches = self.feed.validation(data, workers, collate, self.world)
        stop = (lambda: self.stop_wanted) if stops else None
        with self._averaged_weights():
            self.validated_by_source = {}
            values = evaluate(
                self.program,
                batches,
                self.loss,
                metrics,
                self.plan.call,
                stop=stop,
                by_source=self.validated_by_source,
            )
        self.stopping = self.stopping or not values
        self.guards.writes.after(self.step_count + 1)
        if values and self.tells_validation:
            self.recorder.log_validation(self.step_count, values, self.validated_by_source)
        self.recorder.restart_clock()
        return values

    @collective_call("run.predict")
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for inputs, in evaluation mode and without gradients.

        Every rank must call it.

        Args:
            inputs: this rank's inputs, as the model takes them; the same on ranks that hold parts
                of one copy of the model.

        Raises:
            ConfigError: the layout has cp.
        """
        from shoal.trainer.passes.inference import predict

        with self._averaged_weights():
            outputs = predict(self.program, inputs, self.plan.call)
        self.guards.writes.after(self.step_count + 1)
        return outputs

    @collective_call("run.save")
    def save(
        self,
        folder: str | Path | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        tag: str = "",
        wait: bool = True,
    ) -> Path | None:
        """Write a checkpoint; every rank must call it.

        Args:
            folder: a run folder; default: the one given to `parallelize`.
            extra: plain values, and objects with `state_dict()`, for `run.extra` after a `restore`;
                the same on every rank. None: those of the last save.
            tag: a name, say "best". The checkpoint goes to `folder/tags/TAG`, which keeps only the
                last one, and the call waits for it.
            wait: False: return after the copy to host memory and write during training. A failure
                is raised on all ranks at the next step, and reported as an event.

        Returns:
            The checkpoint's folder. None if writing failed (an event says why; older checkpoints
            are untouched, and training may go on), or if the call did not wait.

        Raises:
            ConfigError: there is no run folder, or another one lies in its place.
        """
        from shoal.trainer.state.replaced_folder import save_in_own_folder

        if extra is not None:
            from shoal.trainer.run_folder.extra_state import decode_value, encode_extra

            self.extra_record["extra"] = told = encode_extra(extra, self.world)
            self.extra = decode_value(told)
        path = save_in_own_folder(self, self._resolve_folder(folder), tag=tag, wait=wait)
        self.recorder.restart_clock()
        return path

    @collective_call("run.restore")
    def restore(
        self, folder: str | Path | None = None, *, step: int | None = None, tag: str = ""
    ) -> bool:
        """Restore the newest complete checkpoint of a run folder; every rank must call it.

        Args:
            folder: a run folder; default: the one given to `parallelize`.
            step: restore the checkpoint of this step only.
            tag: the tag of the checkpoint, as in `save`.

        Returns:
            False if there is no checkpoint, and neither `step` nor `tag` is given.

        Raises:
            CheckpointError: no checkpoint has this step or tag, its tensors do not fit this model
                or optimizer, or `folder` does not exist and lies outside of the run's own folder.
        """
        from shoal.trainer.state.run_state import resolve_tag_folder, restore_run

        self.step_state = StepState()
        self.skips.in_a_row = 0
        chosen = self._resolve_folder(folder)
        if self._saving is not None:
            self._saving.wait_pending()  # a save in flight must not look like an incomplete one
        found = restore_run(self, resolve_tag_folder(chosen, tag), step)
        if not found:
            from shoal.trainer.run_folder.missing_checkpoint import refuse_missing

            refuse_missing(chosen, tag, step, self.recorder.folder, self.world)
        self._restored.add(chosen)
        self.rate.reset()
        self.guards.writes.updated(self.step_count)
        self.recorder.restart_clock()
        # `shoal train` says it itself, and a door has a folder of its own that no user knows.
        if found and chosen == self.recorder.folder and "configuration" not in self.extra_record:
            self.recorder.warn(f"{chosen}: resumed from step {self.step_count}")
        return found

    @collective_call("run.state_dict")
    def state_dict(self, *, average: bool = False) -> dict[str, torch.Tensor]:
        """Return the whole model in the names of the user's module; every rank must call it.

        Args:
            average: the averaged weights instead of the trained ones.

        Returns:
            Parameters as the optimizer steps them (fp32 under bf16, fp16) and persistent buffers,
            tied ones once, on the CPU of every rank. For models too large for that: `save`, and
            `shoal checkpoint export`.

        Raises:
            ConfigError: the run keeps no average, or has made no step yet.
        """
        from shoal.trainer.full_state_dict import check_averaged, gather_full_state_dict

        if average:
            check_averaged(self.average)
        with self._averaged_weights() if average else nullcontext():
            return gather_full_state_dict(self.program)

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """Make the parameters of `run.model` whole inside; at the end each rank cuts its parts.

        Every rank must enter it, between two steps, and make the same changes: rows, norms, new
        draws, `load_state_dict`. The optimizer keeps its state. After an error nothing is changed.

        Raises:
            ConfigError: a step is under way; a weight has another shape at the end, or ranks
                changed it differently.
        """
        from shoal.trainer.state.whole_weights import WholeWeights

        if self.step_state.tally is not None or self.step_state.written is not None:
            raise ConfigError("run.whole_weights: a step is under way; try: after run.update")
        with self.meeting.at("run.whole_weights"):
            weights = WholeWeights(self.program)
        try:
            yield self.model
        except BaseException:
            weights.drop()
            raise
        with self.meeting.at("run.whole_weights"):
            weights.cut()
            self.guards.writes.updated(self.step_count)

    @property
    def mesh(self) -> DeviceMesh:
        """Return torch's DeviceMesh of all ranks, with the axes of the layout, for own collectives.

        Its dims are those of pp, dp_replicate, dp_shard, cp and tp that have several ranks. Every
        rank must ask for it, after `shoal.parallelize`: the first call makes process groups.

        Raises:
            ConfigError: the run has one process.
        """
        from shoal.fabric.axis_worlds import build_device_mesh

        degrees = self.plan.layout.degrees
        axes = [axis for axis, degree in degrees.items() if degree > 1 and axis != "islands"]
        if not axes:
            raise ConfigError("run.mesh: one process has no axes; try: if run.world.size > 1")
        with self.meeting.at("run.mesh"):
            return build_device_mesh(self.world, degrees, axes)

    def request_stop(self) -> None:
        """Request a stop; after the next step `run.stopping` is true on every rank."""
        self.stop_wanted = True

    def stop_on_signals(self) -> None:
        """Make SIGTERM, Ctrl-C and SIGUSR1 on any rank call `request_stop`, until `close`."""
        from shoal.trainer.process.stop_signals import install_stop_handlers

        put_back = install_stop_handlers(self.request_stop, self.recorder.emit_rank_notice)
        self.program = replace(self.program, on_close=(*self.program.on_close, put_back))

    def __enter__(self) -> Run:
        """Return the run, which `with` closes at its end, except after an error."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_what: object) -> None:
        if kind is None and not self._closed:
            self.close()

    @collective_call("run.close")
    def close(self) -> None:
        """Close the run and leave the other processes; call it last.

        The model keeps its weights in their original dtype, without Shoal's hooks; under fsdp it
        stays sharded. The optimizer keeps the tensors that this rank stepped.

        Raises:
            TrainingError: every step of this process was skipped, so no weight moved. The run is
                closed then. So `python train.py && publish` publishes no untrained model.
        """
        self._closed = True
        self.skips.print_totals(self.recorder.warn)
        self.recorder.log_memory_peaks()
        if self._saving is not None:
            self._saving.close()
        self.guards.close()
        for undo in self.program.on_close:
            undo()
        self.world.close()
        self.meeting.close_run()
        if self.lease is not None:
            self.lease.release()
        if self.skips.skipped and self.skips.is_own_loop:
            self.skips.check_moved(self.step_count - self.skips.steps, self.step_count)

    def _averaged_weights(self) -> AbstractContextManager[None]:
        if (average := self.average) is not None and average.updates:
            return average.swap_weights(reducer_of(self.program).publish)
        return nullcontext()

    def _resolve_folder(self, folder: str | Path | None) -> Path:
        chosen = Path(folder) if folder is not None else self.recorder.folder
        if chosen is None:
            raise ConfigError('no run folder; try: shoal.parallelize(…, folder="runs/x")')
        return chosen
