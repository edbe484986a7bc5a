"""Model, optimizer and schedules that `accelerator.prepare` returns to a script.

They do what Accelerate's do, on a run of Shoal's: a step of the optimizer is one of the run when
gradients are complete, and a schedule steps with it, once per process. `LocalSGD` lets each process
step by itself for a while.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.neighbours.library_loop import LibraryLoop, LocalLoop, ModelWrapper
from shoal.neighbours.outputs.final_saves import report_final_saves
from shoal.trainer.run import Run


class PreparedModel(ModelWrapper):
    """A prepared model, called as before; `module` is the user's own."""

    def __init__(self, module: nn.Module, accelerator: Any) -> None:
        super().__init__(module.to(accelerator.device))
        self.is_ddp = accelerator.use_distributed and not accelerator.by_fsdp

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """Return the module's state dict; under DDP its names begin with `module.`."""
        if self.is_ddp:
            return super().state_dict(*args, **named)
        return self.module.state_dict(*args, **named)

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        """Load a state dict of the module or of this wrapper."""
        known = self.module.state_dict(keep_vars=True)
        if not known.keys() & state_dict.keys():
            state_dict = {k.removeprefix("module."): one for k, one in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **named)


class PreparedOptimizer(torch.optim.Optimizer):
    """Prepared optimizer, whose step ends a step of the run, at the end of an accumulation.

    Groups, state and defaults are those of the script's own; torch's schedules accept it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Any) -> None:
        self.optimizer, self.accelerator = optimizer, accelerator
        self.loop: LibraryLoop | None = None
        self.clipped = self.step_was_skipped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the script's own optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state dict into the script's own optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        """Update the weights, if this pass completes the gradients."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure): the run calls no closure; try: AdamW")
        if self.loop is None:
            raise ConfigError("optimizer.step: its model was not given to accelerator.prepare")
        if not self.accelerator.sync_gradients:
            return
        if not self.clipped:
            self.loop.clip(0.0)
        done = self.loop.update()
        self.loop.run.adjust = None
        self.clipped, self.step_was_skipped = False, done.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no update used."""
        if self.loop is not None and self.accelerator.sync_gradients:
            self.loop.drop()

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class PreparedScheduler:
    """Prepared schedule: it steps with the optimizer, once per process or per split batch."""

    def __init__(self, scheduler: Any, accelerator: Any) -> None:
        self.scheduler, self.accelerator = scheduler, accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    def step(self, *args: Any, **named: Any) -> None:
        """Step, unless the optimizer did not."""
        told = self.accelerator
        if not told.step_scheduler_with_optimizer:
            self.scheduler.step(*args, **named)
            return
        if not told.sync_gradients:
            if told.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        its = getattr(self.scheduler, "optimizer", None)
        own = [one for one in told.optimizers if its in (one, one.optimizer)]
        if any(one.step_was_skipped for one in own or told.optimizers):
            return
        for _ in range(1 if told.split_batches else told.num_processes):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or told.split_batches or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **named)


class LocalSGD:
    """Context of steps that each process makes by itself; every k-th averages the weights.

    The optimizer's state stays each process's own, as in Accelerate.
    """

    def __init__(
        self, accelerator: Any, model: PreparedModel, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        self.accelerator, self.model, self.every = accelerator, model, local_sgd_steps
        self.enabled, self.num_steps = enabled and accelerator.num_processes > 1, 0

    def __enter__(self) -> LocalSGD:
        if self.enabled and self.model.loop is not None:
            self.together, self.alone = self.model.loop, LocalLoop(self.model.loop.run)
            self.together.drop()
            self._switch_loop(self.together, self.alone)
        return self

    def _switch_loop(self, old: LibraryLoop, new: LibraryLoop) -> None:
        for one in (self.model, *self.accelerator.optimizers):
            if one.loop is old:
                one.loop = new

    def step(self) -> None:
        """Count a step; average the weights at every k-th."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.every == 0:
            self.alone.average()

    def __exit__(self, *_what: object) -> None:
        if self.enabled:
            self.alone.average()
            self._switch_loop(self.alone, self.together)


def report_saves(run: Run, accelerator: Any) -> None:
    """Report, before training, each save call of the script that behaves differently here."""
    report_final_saves(run, accelerator, {"Accelerator"}, "prepare", SAVES)


SAVES = "accelerator.save_model(model, folder), or state_dict=accelerator.get_state_dict(model)"
"""The calls that save whole weights under fsdp."""
