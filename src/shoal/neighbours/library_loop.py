"""A run whose loop is another library's: that calls the model and backward, and updates.

Layouts that support such a loop hold the whole model in every forward pass: ddp, zero 1 to 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.neighbours.batch_duplicates import EqualBatchesCheck
from shoal.neighbours.outputs.final_saves import rescue_refused_saves
from shoal.neighbours.rank_buffers import RankBuffers
from shoal.neighbours.sources.frozen_weights import THAWING, composed_as_training, freeze_again
from shoal.trainer import parallelize as parallelizing
from shoal.trainer.full_state_dict import GIVE_COPIES
from shoal.trainer.passes.free_passes import FreePasses
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult

FOLDER = "SHOAL_FOLDER"
"""Environment variable: folder for metrics and events of a script of another library."""
_used_folders: set[str] = set()

count_of: Callable[[torch.Tensor], torch.Tensor] | None = None
"""Returns a loss's number of targets, if losses are weighed by it (`exact.py`)."""


def claim_run_folder() -> dict[str, Any]:
    """Return the run folder that the user asked for, as an argument of `parallelize`.

    The first run of a process has it; a script's further runs have none.
    """
    folder = os.environ.get(FOLDER)
    if not folder or folder in _used_folders:
        return {}
    _used_folders.add(folder)
    return {"folder": folder}


def start_library_run(
    model: nn.Module, optimizer: Any, *, library: str, saves: str, **how: Any
) -> Run:
    """Start a run, as `parallelize`, but keep the model's training mode: the loop sets it itself.

    A model of transformers comes in evaluation mode, and the other libraries train it in that mode
    if a script forgets `model.train()`.

    Args:
        library: its name; a replay answers the script's import of it again.
        saves: the loop's call that saves whole weights, for the line that refuses another.
    """
    trains = model.training
    with composed_as_training(model, str(how.get("layout"))) as frozen:
        run = parallelizing.parallelize(model, optimizer, prove="off", **how, **claim_run_folder())
    if frozen:
        freeze_again(run.model, frozen)
        THAWING.add(run)
    if run.world.writes_files:
        weighs = count_of is not None
        run.recorder.events.emit("library_run", library=library, exact=weighs)
    described = parallelizing.describe_run(run)
    run.recorder.warn(f"{described}; batches are those of the script's loaders")
    if not trains:
        run.model.eval()
    if run.plan.layout.zero == 3:
        rescue_refused_saves(run, saves)
    elif run.plan.layout.zero:
        GIVE_COPIES.update(run.model.modules())
    return run


class LibraryLoop:
    """Steps of a run, driven pass by pass from a foreign loop.

    Args:
        run: the run.
        check: the comparison of the first steps' batches.
        broadcasts: the library broadcasts buffers as DDP does (`rank_buffers.py`).

    Attributes:
        last: result of the last update; None before the first.
        buffers: None under `--exact`, where a run's own rules hold.
    """

    def __init__(
        self, run: Run, check: EqualBatchesCheck | None = None, *, broadcasts: bool = False
    ) -> None:
        self.run, self.check = run, check
        self.last: StepResult | None = None
        self.buffers: RankBuffers | None = None
        if count_of is None and next(run.model.buffers(), None) is not None:
            self.buffers = RankBuffers(run, broadcasts=broadcasts)

    @property
    def passes(self) -> FreePasses | None:
        """Passes of the step under way, or None."""
        written = self.run.step_state.written
        return written if isinstance(written, FreePasses) else None

    @property
    def awaits_backward(self) -> bool:
        """Return whether a forward pass waits for its backward."""
        return self.passes is not None and self.passes.in_progress

    @property
    def begun(self) -> bool:
        """Return whether a step is under way: the model was called since the last update."""
        return self.passes is not None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; in training, as a pass of the step under way."""
        if self.check is not None and self.run.model.training and torch.is_grad_enabled():
            self.check.add([inputs, named])
        if self.buffers is not None:
            self.buffers.enter_pass()
        return self._passes().forward(*inputs, **named)

    @contextmanager
    def before_last_pass(self) -> Iterator[None]:
        """Enclose a pass that is not its step's last one, as DDP's `no_sync`."""
        if self.buffers is not None:
            self.buffers.last = False
        try:
            yield
        finally:
            if self.buffers is not None:
                self.buffers.last = True

    def save(self, folder: Path, *, extra: Mapping[str, Any]) -> Path | None:
        """Write a checkpoint with rank 0's buffers, as `Run.save`."""
        with self._saved_buffers():
            return self.run.save(folder, extra=extra)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors on every rank, with rank 0's buffers."""
        with self._saved_buffers():
            return self.run.state_dict()

    def _saved_buffers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.buffers is None else self.buffers.as_on_first_rank()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float,
        last: bool,
        retain_graph: bool = False,
        others: Sequence[LibraryLoop] = (),
    ) -> None:
        """Add the gradients of `share` of a loss.

        Args:
            loss: a scalar.
            share: factor of the loss.
            last: this is the step's last pass.
            retain_graph: as in `torch.Tensor.backward`.
            others: loops whose models may have made the loss, too.
        """
        count = count_of(loss) if count_of and isinstance(loss, torch.Tensor) else None
        told = [one.passes for one in others if one.passes is not None]
        passes = self._passes()
        with ExitStack() as stack:
            for one in (self, *others):
                stack.enter_context(one.run.meeting.hide_views())
            passes.backward(
                loss, share=share, last=last, retain_graph=retain_graph, count=count, others=told
            )

    def norm(self) -> float:
        """All-reduce gradients; return the norm of the mean gradient. Every rank calls it."""
        passes = self._passes()
        with self.run.meeting.hide_views():
            tally = passes.finish()
        return tally.norm / (tally.count * self.run.scale)

    def clip(self, norm: float) -> None:
        """Clip the mean gradient in updates from now on; 0: none."""
        if self.run.plan.clip != norm:
            self.run.program = self.run.program.but(clip=norm)

    def drop(self) -> None:
        """Discard the gradients of the step under way."""
        self.run.step_state.written = None

    def update(self) -> StepResult:
        """All-reduce gradients, clip them, step the optimizer; or skip that, on all ranks."""
        self._passes()
        if self.run in THAWING and not self.run.plan.layout.zero:
            self.run.guards.optimizer.accept_groups()
        self.last = self.run.update()
        if self.check is not None:
            self.check.compare()
        return self.last

    def _passes(self) -> FreePasses:
        run, passes = self.run, self.passes
        if passes is None:
            with run.meeting.at("the first pass of a step"):
                run.begin_step(None)
                passes = FreePasses(run.program, run.step_count, run.scale, run.collect_flags)
                run.step_state.written = passes
        return passes


class ModelWrapper(nn.Module):
    """Wrapper that a script calls in place of its model: the same outputs and attributes.

    Args:
        module: the script's own.
        loop: the loop whose pass a call is; None: without training.
    """

    def __init__(self, module: nn.Module, loop: LibraryLoop | None = None) -> None:
        super().__init__()
        self.module, self.loop = module, loop

    def no_sync(self) -> AbstractContextManager[None]:
        """Enclose passes whose gradients need no all-reduce yet; the update reduces them."""
        return nullcontext() if self.loop is None else self.loop.before_last_pass()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules.get("module"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's own outputs."""
        call = self.module if self.loop is None else self.loop.forward
        return call(*inputs, **named)


class LocalLoop(LibraryLoop):
    """Local steps of this rank, on a run's model and optimizer, without communication.

    Between them `average` makes the weights of all ranks equal, as they must be when the run goes
    on.

    Raises:
        ConfigError: a rank holds weights in part, or in another dtype.
    """

    def __init__(self, run: Run) -> None:
        layout, compute = run.plan.layout, run.plan.compute
        if layout.zero or compute != "fp32":
            raise ConfigError(
                f"LocalSGD: each rank steps whole weights in fp32 by itself, and layout.strategy "
                f"is {layout.strategy}, precision.compute {compute}; try: ddp in fp32, or an "
                f"island for each process (docs/how-it-works/islands.md)"
            )
        super().__init__(run)
        self._norm = 0.0
        self.drop()

    @property
    def begun(self) -> bool:
        """Return whether the model was called since the last update."""
        return self._passed

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        self._passed = True
        return self.run.model(*inputs, **named)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float,
        last: bool,
        retain_graph: bool = False,
        others: Sequence[LibraryLoop] = (),
    ) -> None:
        """Add the gradients of `share` of a loss to this rank's own."""
        torch.autograd.backward(loss * share, retain_graph=retain_graph)

    def norm(self) -> float:
        """Return the norm of this rank's gradient."""
        held = [p.grad for p in self.run.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(held))

    def clip(self, norm: float) -> None:
        """Clip the gradient in the next update."""
        self._norm = norm

    def drop(self) -> None:
        """Discard this rank's gradients."""
        self._passed = False
        for one in self.run.model.parameters():
            one.grad = None

    def update(self) -> StepResult:
        """Step the optimizer by this rank's gradients alone."""
        run, norm = self.run, 0.0
        if self._norm:
            norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), self._norm))
        with run.guards.writes.mark_own_step():
            run.optimizer.step()
        self.drop()
        rate = float(run.optimizer.param_groups[0]["lr"])
        return StepResult(run.step_count, float("nan"), norm, rate, 0.0, False, "")

    def average(self) -> None:
        """Average every weight over ranks; every rank calls it."""
        world = self.run.world
        for one in self.run.model.parameters():
            world.all_reduce(one.data)
            one.data /= world.size
