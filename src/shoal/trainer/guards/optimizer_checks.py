"""The user's optimizer around a step: its rate, its groups, and whether it trains at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import ConfigError
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.base.plans.tensor_shards import check_savable
from shoal.optim.named_state import parameters_held, split_state
from shoal.parallel.program import Program, dtype_of
from shoal.trainer.guards.guard import Guard


@dataclass
class Length:
    """The length of a run as its learning-rate schedule needs it.

    Attributes:
        schedule: of the rate, over `total_steps`; None: the rate is the user's.
    """

    schedule: OptimizerPolicy | None = None
    total_steps: int = 0


class LearningRate:
    """Sets the rate of an optimizer's groups before each update, where the run has a schedule.

    Args:
        optimizer: the run's.
        length: of the run, and its schedule.

    Raises:
        ConfigError: a group has no rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, length: Length) -> None:
        self.optimizer, self.length = optimizer, length
        self._last: list[float] = []
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError("optimizer: a group has no lr; try: defaults of its class with 'lr'")
        if length.schedule is not None:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    def set(self, step: int) -> float:
        """Set the rate of `step` in all groups, and return the first group's.

        Raises:
            ConfigError: a schedule without an end, or one whose rate somebody else changed.
        """
        policy, total = self.length.schedule, self.length.total_steps
        groups = self.optimizer.param_groups
        if policy is not None:
            if total < 1:
                raise told().endless(policy.schedule, total)
            now = [float(group["lr"]) for group in groups]
            if self._last and now != self._last:
                raise told().other_rate(policy.schedule, now[0])
            from shoal.optim.schedule import lr_factor

            factor = lr_factor(policy, step, total)
            for group in groups:
                group["lr"] = group["initial_lr"] * factor
            self._last = [float(group["lr"]) for group in groups]
        return float(groups[0]["lr"]) if groups else 0.0

    def restored(self) -> None:
        """Take the rates for those of a checkpoint."""
        self._last = []


class OptimizerGuard(Guard):
    """Find optimizers that move nothing, whose groups changed, whose state cannot be saved.

    Args:
        optimizer: the run's.
        program: the run's.
        notice: prints a line, by rank 0.

    Attributes:
        state_checked: an update is over, and what it left can be saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, program: Program, notice: Callable[[str], None]
    ) -> None:
        self.optimizer, self.program, self.notice = optimizer, program, notice
        self.state_checked = False
        self.movement = MovementCheck()
        self._held = parameters_held(self.optimizer)
        self._loading: RemovableHandle | None = None
        layout = program.plan.layout
        if layout.zero or program.cuts or program.pipe.size > 1:
            self._loading = optimizer.register_load_state_dict_pre_hook(self._refuse_state)

    @property
    def watch(self) -> Callable[[Program, torch.optim.Optimizer], None] | None:
        """Return the check before the optimizer's step, until a weight was seen to move."""
        return None if self.movement.done else self.movement.look

    def updating(self, step: int) -> None:
        """Raises: ConfigError, for parameters that came or went since `parallelize`."""
        if not self.state_checked and not any(g["lr"] for g in self.optimizer.param_groups):
            self.notice("optimizer: every learning rate is 0, so nothing trains yet")
        held = parameters_held(self.optimizer)
        if held != self._held:
            raise told().other_groups(held, self._held)

    def updated(self, step: int, *, skipped: bool) -> None:
        """Raises: ConfigError, for an optimizer that moves nothing, or that cannot be saved."""
        if skipped:
            return
        if not self.movement.done and self.movement.moved() is False:
            raise told().moved_nothing()
        if not self.state_checked:
            names: dict[Any, str] = {p.parameter: n for n, p in self.program.local.items()}
            names.update({p: n for n, p in self.program.frozen.items()})
            # Refuses now what the first save could not write.
            state = split_state(self.optimizer, names)[0]
            check_savable({name: dtype_of(tensor) for name, tensor in state.items()}, "optimizer")
            self.state_checked = True

    def close(self) -> None:
        """Leave the optimizer alone."""
        if self._loading is not None:
            self._loading.remove()

    def _refuse_state(self, *_what: object) -> None:
        raise told().state_of_parts(self.program.plan.layout.text())


def told() -> Any:
    """Import the words: they are seldom needed."""
    from shoal.trainer.guards.reports import optimizer_report as optimizer

    return optimizer


def _stepped(program: Program) -> list[nn.Parameter]:
    return [local.parameter for local in program.local.values()]


class MovementCheck:
    """Proves once that the optimizer trains this model: some parameter with a gradient must move.

    An optimizer that keeps its own copies, built before a model was cast or moved, steps happily
    over tensors that nobody uses. Before the first real update a few small parameters are copied,
    of those whose update cannot vanish in rounding; after it one of them must differ. Updates that
    may vanish (a warm-up that starts at lr 1e-9) prove nothing and are waited out.
    """

    WATCHED, WATCHED_BYTES = 8, 2**20

    def __init__(self) -> None:
        self.done = False
        self.before: list[tuple[nn.Parameter, torch.Tensor]] = []

    def look(self, program: Program, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are final: remember the smallest parameters that must move now."""
        lr_of: dict[int, float] = {}
        for group in optimizer.param_groups:
            lr_of.update({id(p): float(group.get("lr", 1.0) or 0.0) for p in group["params"]})
        self.before = []
        for parameter in sorted(_stepped(program), key=lambda p: p.numel()):
            gradient, lr = parameter.grad, lr_of.get(id(parameter), 0.0)
            if gradient is None or not parameter.numel():
                continue
            copied_bytes = sum(old.nbytes for _, old in self.before)
            if copied_bytes and copied_bytes + parameter.nbytes > self.WATCHED_BYTES:
                return  # a model of few large tensors would be copied whole
            # Plain descent moves by lr · gradient, normalised methods by about lr.
            reach = lr * min(1.0, float(torch.linalg.vector_norm(gradient, math.inf)))
            largest = float(torch.linalg.vector_norm(parameter.detach(), math.inf))
            lost = 8 * torch.finfo(parameter.dtype).eps * largest
            if reach > lost:
                self.before.append((parameter, parameter.detach().clone()))
            if len(self.before) == self.WATCHED:
                return

    def moved(self) -> bool | None:
        """After the update: did a watched parameter move? None if none was worth watching."""
        watched, self.before = self.before, []
        if not watched:
            return None
        self.done = True
        return any(not torch.equal(p.detach(), old) for p, old in watched)
