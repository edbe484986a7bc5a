"""A run: the user's model, optimizer and loss, made ready for every process that was started.

`parallelize` builds the plan and the program; `Run.step` is one optimizer step. The main job of
`shoal train` is a client of this file like any other loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.plan import Plan
from shoal.checkpoint.lease import RunLease
from shoal.data.iterable import IterableLoader
from shoal.data.loader import Loader
from shoal.data.step import StepBatch
from shoal.fabric import World
from shoal.optim.average import WeightAverage
from shoal.optim.schedule import lr_factor
from shoal.optim.state import split_state
from shoal.parallel.program import Program
from shoal.profile.memory import peak_memory_bytes
from shoal.trainer.contract import Loss
from shoal.trainer.evaluate import Metric, evaluate
from shoal.trainer.feed import Feed
from shoal.trainer.loss_scale import LossScale
from shoal.trainer.own_folder import refuse_old_checkpoints
from shoal.trainer.record import Recorder
from shoal.trainer.result import StepResult, counted
from shoal.trainer.saving import FAILED, Saving
from shoal.trainer.settings import RunSettings
from shoal.trainer.share import busiest, own_micro_batches
from shoal.trainer.skips import Skips
from shoal.trainer.state import Beside, check_savable, restore_run, save_run
from shoal.trainer.step import (
    NO_TARGET,
    MovementCheck,
    Tally,
    Updated,
    forward_backward,
    reducer_of,
    update,
)


class Run:
    """One model in training; several may live in one process (a GAN).

    model       the module, on its device · world  the processes · plan  what was decided
    step_count  optimizer steps taken so far, skipped ones included
    beside      further tensors that checkpoints keep · adjust  changes the final mean gradient
    lr_step     the step whose learning rate counts, where that is not `step_count`
    first_key   added to micro-batches' numbers, which randomness is keyed by
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        settings: RunSettings,
        recorder: Recorder,
    ) -> None:
        self.program = program
        self.optimizer = optimizer
        self.loss = loss
        self.settings = settings
        self.recorder = recorder
        self.step_count = 0
        self.feed = Feed(program.plan, program.data, settings.seed)
        self.stopping = False
        self.beside: Beside | None = None
        self.adjust: Callable[[], None] | None = None
        self.lr_step: int | None = None
        self.first_key = 0
        self.extra_record: dict[str, Any] = {}
        self._tally: Tally | None = None
        self._batch: Any = None
        self._spare: Any = None
        self._data_wait_s = 0.0
        self._stop_wanted = False
        self._closed = False
        self._restored: set[Path] = set()
        self.lease: RunLease | None = None
        fp16 = program.plan.precision == "fp16"
        self.loss_scale = LossScale(settings.loss_scale) if fp16 else None
        self.saving = Saving(program.world, recorder.events.emit, recorder.notice)
        stepped = {name: one.parameter for name, one in program.local.items()}
        self.average = WeightAverage(settings.average, stepped) if settings.average else None
        self.skips = Skips(settings.skip_limit)
        self._movement = MovementCheck()
        self._state_checked = False
        self._held = _parameters_held(optimizer)
        self._tell()
        if settings.schedule is not None:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    @property
    def model(self) -> nn.Module:
        """The module that trains."""
        return self.program.module

    @property
    def world(self) -> World:
        """The processes of this run."""
        return self.program.world

    @property
    def plan(self) -> Plan:
        """The layout, the batch arithmetic and the gradient buckets."""
        return self.program.plan

    def loader(
        self, dataset: Any, *, workers: int = 0, collate: Any = None
    ) -> Loader | IterableLoader:
        """Batches of a dataset in this run's order, each rank getting its own micro-batches.

        dataset    map-style (`__getitem__`, `__len__`) or an iterable with `state_dict()`
        Gives      an iterable over the steps of one epoch; iterating again is the next epoch
        Errors     ConfigError for an object that is neither
        After `restore`, the first loader goes on where the checkpoint was taken. The same dataset
        gives the same loader again.
        """
        return self.feed.open(dataset, workers, collate)

    def step(self, batch: Any) -> StepResult:
        """Forward, backward, clip and update for one optimizer step.

        batch    a batch of `run.loader`, or this rank's own share of the step's samples,
                 (inputs, targets) or one dict
        Errors   ConfigError for a loss that returns a mean; TrainingError after too many
                 non-finite steps in a row
        """
        self.forward_backward(batch)
        return self.update()

    def steps(self, data: Any, *, workers: int = 0, collate: Any = None) -> Iterator[StepResult]:
        """`step` over one epoch of a dataset, split over ranks here, or over this rank's batches.

        Errors   as `step`; ConfigError for a DataLoader that gives every rank the whole dataset
        """
        for batch in self.feed.training(data, workers, collate):
            yield self.step(batch)

    def print(self, *values: object) -> None:
        """A line on standard output, from rank 0 alone."""
        if self.world.is_first:
            sys.stdout.write(" ".join(map(str, values)) + "\n")

    def forward_backward(self, batch: Any) -> None:
        """The first half of `step`: gradients of the loss sum, summed over ranks, in `.grad`."""
        if self._closed:
            raise ConfigError("run.step was called after run.close; close a run last")
        if self._tally is not None:
            raise ConfigError(
                "run.forward_backward was called twice without run.update between; give all "
                "micro-batches of one optimizer step in one batch"
            )
        folder = self.recorder.folder
        if folder is not None and folder not in self._restored:
            refuse_old_checkpoints(folder, self.world)
            self._restored.add(folder)
        self._data_wait_s = self.recorder.data_wait_s()
        self._batch = batch
        cut = self.plan.micro_batch if self.settings.cut_own_batches else 0
        micro_batches = own_micro_batches(batch, cut, self.program.data)
        micro_batches = [(self.first_key + index, value) for index, value in micro_batches]
        spare = micro_batches[-1][1] if micro_batches else self._spare
        self._tally = forward_backward(
            self.program,
            micro_batches,
            self.loss,
            step=self.step_count,
            rounds=busiest(self.program, batch, len(micro_batches), has_spare=spare is not None),
            spare=spare,
            scale=self.loss_scale.value if self.loss_scale else 1.0,
            call=self.settings.call,
            stop=self._stop_wanted,
            save_failed=self.saving.report() == FAILED,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
        )
        if not self._tally.broken:
            self._spare = spare  # one whose numbers are well, for a step that leaves nothing
        self.stopping = self._tally.stop
        if self._tally.save_failed:
            self.saving.settle()  # on all ranks; says what went wrong

    def update(self) -> StepResult:
        """The second half: mean gradient, clipping, optimizer step; or a skip, on all ranks."""
        if self._tally is None:
            raise ConfigError("run.update was called before run.forward_backward")
        tally, self._tally = self._tally, None
        self._check_groups()
        lr = self._set_lr()
        watch = None if self._movement.done else self._movement
        scale = self.loss_scale.value if self.loss_scale else 1.0
        done = update(
            self.program,
            self.optimizer,
            tally,
            clip=self.settings.clip,
            scale=scale,
            watch=watch,
            adjust=self.adjust,
        )
        self._tell()
        if not done.skipped:
            self._check_first_update()
            if self.average is not None:
                self.average.update()
        self.step_count += 1
        self.feed.consumed(self._batch)
        result = StepResult(
            self.step_count, done.loss, done.grad_norm, lr, counted(tally.count), done.skipped,
            done.reason,
        )  # fmt: skip
        self._record(result, tally)
        batch, self._batch = self._batch, None
        if self.loss_scale is not None and self._lowered(self.loss_scale, done, tally):
            return result
        if done.skipped:
            emit = self.recorder.events.emit
            self.skips.skipped(result.step, done.reason, tally.broken, batch, self.world, emit)
        else:
            self.skips.moved()
        return result

    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Metric] | None = None,
        *,
        workers: int = 0,
        collate: Any = None,
    ) -> dict[str, float]:
        """Means of the loss and of metrics over every sample once, on all ranks together.

        data      a dataset (split over ranks here), or an iterable of this rank's own batches
        metrics   name → function(outputs, targets) giving (sum, count) or unreduced values
        Gives     {"loss": …, NAME: …, "targets": count}, equal on all ranks
        """
        batches = self.feed.validation(data, workers, collate)
        with self._averaged():
            values = evaluate(
                self.program, batches, self.loss, metrics or {}, call=self.settings.call
            )
        self.recorder.restart_clock()
        return values

    def save(self, folder: str | Path | None = None, *, wait: bool = True) -> Path | None:
        """Write a checkpoint; every rank must call it.

        folder   a run folder; default: the one given to `parallelize`
        wait     False: return after the copy to host memory and write beside training; a failure is
                 told on all ranks at the next step, and by an event
        Gives    the checkpoint's folder, or None if writing failed (an event says why; the older
                 checkpoints are untouched, and training may go on) or was not waited for
        Errors   ConfigError without any folder
        """
        path = save_run(self, self._folder(folder), wait=wait)
        self.recorder.restart_clock()
        return path

    def restore(self, folder: str | Path | None = None, *, step: int | None = None) -> bool:
        """Go on from the newest complete checkpoint of a run folder; every rank must call it.

        step     of the checkpoint that is wanted, and no other
        Gives    False if there is none
        Errors   CheckpointError if its tensors do not fit this model or optimizer
        """
        self._tally, self.skips.in_a_row = None, 0
        chosen = self._folder(folder)
        self.saving.settle()  # what is still being written must not be taken for a leftover
        found = restore_run(self, chosen, step)
        self._restored.add(chosen)
        self.recorder.restart_clock()
        return found

    def request_stop(self) -> None:
        """Ask for a stop; after the next step `run.stopping` is true on every rank alike."""
        self._stop_wanted = True

    def close(self) -> None:
        """Leave the other processes in an orderly way; call it last.

        No hook of ours is left, and the model holds the weights as wide as they came. The optimizer
        goes on holding what this rank stepped, and under fsdp the model stays sharded.
        """
        self._closed = True
        self.saving.close()
        for undo in self.program.on_close:
            undo()
        self.world.close()
        if self.lease is not None:
            self.lease.release()

    def _averaged(self) -> AbstractContextManager[None]:
        """The averaged weights in the place of the weights, where there are any."""
        if self.average is None or not self.average.updates:
            return nullcontext()
        return self.average.swapped(reducer_of(self.program).publish)

    def _folder(self, folder: str | Path | None) -> Path:
        chosen = Path(folder) if folder is not None else self.recorder.folder
        if chosen is None:
            raise ConfigError('no run folder; nearest: shoal.parallelize(…, folder="runs/x")')
        return chosen

    def _lowered(self, scale: LossScale, done: Updated, tally: Tally) -> bool:
        """Whether this step was lost to a loss scale that was too large, and is smaller now."""
        if not done.skipped:
            scale.held()
            return False
        each = tally.count / max(1, sum(tally.micro_batches))
        if tally.loss_broken or done.reason == NO_TARGET or not scale.overflowed(each):
            return False
        if self.world.is_first:
            self.recorder.events.emit(
                "loss_scale_lowered", step=self.step_count, ranks=tally.broken, scale=scale.value
            )
        return True

    def _set_lr(self) -> float:
        policy, total = self.settings.schedule, self.settings.total_steps
        if policy is not None:
            if total < 1:
                raise ConfigError(
                    f"total_steps = {total}: schedule = {policy.schedule} needs the length of the "
                    f"run; give shoal.parallelize(…, total_steps=…)"
                )
            step = self.step_count if self.lr_step is None else self.lr_step
            factor = lr_factor(policy, step, total)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else 0.0

    def _tell(self) -> None:
        while self.program.notices:
            self.recorder.notice(self.program.notices.pop(0))

    def _check_groups(self) -> None:
        if not self._state_checked and not any(g["lr"] for g in self.optimizer.param_groups):
            self.recorder.notice("optimizer: every learning rate is 0, so nothing trains yet")
        held = _parameters_held(self.optimizer)
        if held != self._held:
            raise ConfigError(
                f"optimizer: holds {held} parameters, {self._held} when shoal.parallelize was "
                f"called; change groups before, or save, and parallelize again"
            )

    def _check_first_update(self) -> None:
        if not self._movement.done and self._movement.moved() is False:
            raise ConfigError(
                "optimizer: its first step moved no parameter that has a gradient: it steps over "
                "other tensors than the model's; give parallelize a function params -> optimizer"
            )
        if not self._state_checked:
            names: dict[Any, str] = {p.parameter: n for n, p in self.program.local.items()}
            names.update({p: n for n, p in self.program.frozen.items()})
            # Refuses now what the first save could not write.
            check_savable(split_state(self.optimizer, names)[0], "optimizer")
            self._state_checked = True

    def _record(self, result: StepResult, tally: Tally) -> None:
        batch = self._batch
        loaded = isinstance(batch, StepBatch)
        extras: dict[str, Any] = {"skipped": result.skipped}
        if self.loss_scale is not None:
            extras["loss_scale"] = self.loss_scale.value
        samples = 0
        if loaded:
            extras["samples"] = [batch.position, batch.next_position]
            samples = batch.next_position - batch.position
        self.recorder.step(
            {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": result.targets,
                "data_wait_s": self._data_wait_s,
                "peak_memory_bytes": max(tally.peak_memory_bytes),
                "peak_memory_bytes_by_rank": tally.peak_memory_bytes,
                **extras,
            },
            samples=samples,
        )


def _parameters_held(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
