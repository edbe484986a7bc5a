"""Checks of the user's optimizer around a step: learning rate, groups, and whether weights move."""

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
from shoal.optim.named_state import count_parameters, group_settings, split_state
from shoal.parallel.program import Program, dtype_of
from shoal.trainer.guards import reports
from shoal.trainer.guards.guard import Guard


@dataclass
class ScheduleLength:
    """Length of a run, as its learning-rate schedule needs it.

    Attributes:
        schedule: of the learning rate, over `total_steps`; None: the user sets the rate.
        total_steps: optimizer steps of the run.
    """

    schedule: OptimizerPolicy | None = None
    total_steps: int = 0


class LearningRateSetter:
    """Setter of the learning rate of all groups before each update, if there is a schedule.

    Args:
        optimizer: the run's.
        length: of the run, and its schedule.

    Attributes:
        initial_settings: hyper-parameters of each group when the run began; what differs from them
            at a save is the run's own state.

    Raises:
        ConfigError: a group has no rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, length: ScheduleLength) -> None:
        self.optimizer, self.length = optimizer, length
        self._last: list[float] = []
        self.initial_settings = group_settings(optimizer)
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError("optimizer: a group has no lr; try: defaults of its class with 'lr'")
        if length.schedule is not None:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    def set(self, step: int) -> float:
        """Set the rate of `step` in all groups, and return the first group's.

        Raises:
            ConfigError: the schedule has no end, or other code changed its rate.
        """
        policy, total = self.length.schedule, self.length.total_steps
        groups = self.optimizer.param_groups
        if policy is not None:
            if total < 1:
                raise reports.optimizer_report.endless_schedule_error(policy.schedule, total)
            now = [float(group["lr"]) for group in groups]
            if self._last and now != self._last:
                raise reports.optimizer_report.changed_rate_error(policy.schedule, now[0])
            from shoal.optim.schedule import lr_factor

            factor = lr_factor(policy, step, total)
            for group in groups:
                group["lr"] = group["initial_lr"] * factor
            self._last = [float(group["lr"]) for group in groups]
        return float(groups[0]["lr"]) if groups else 0.0

    def reset(self) -> None:
        """Accept the rates of a restored checkpoint."""
        self._last = []


class OptimizerGuard(Guard):
    """Guard against optimizers that move nothing, change groups, or cannot be saved.

    Args:
        optimizer: the run's.
        program: the run's.
        notice: prints a line, by rank 0.

    Attributes:
        state_checked: an update is over, and its optimizer state can be saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, program: Program, notice: Callable[[str], None]
    ) -> None:
        self.optimizer, self.program, self.notice = optimizer, program, notice
        self.state_checked = False
        self.movement = MovementCheck()
        self._held = count_parameters(self.optimizer)
        self._loading: RemovableHandle | None = None
        layout = program.plan.layout
        self._lists: list[Any] = []
        if layout.zero or program.cuts or program.pipe.size > 1:
            self._lists = [group["params"] for group in optimizer.param_groups]
            self._loading = optimizer.register_load_state_dict_pre_hook(self._refuse_state)

    @property
    def pre_step_check(self) -> Callable[[Program, torch.optim.Optimizer], None] | None:
        """Return the check before the optimizer's step, until a weight has moved."""
        return None if self.movement.done else self.movement.copy_weights

    def updating(self, step: int) -> None:
        """Check the parameters of the optimizer.

        Raises:
            ConfigError: parameters came or went since `parallelize`.
        """
        if not self.state_checked and not any(g["lr"] for g in self.optimizer.param_groups):
            self.notice("optimizer: every learning rate is 0, so nothing trains yet")
        held = count_parameters(self.optimizer)
        if held != self._held:
            raise reports.optimizer_report.changed_groups_error(held, self._held)
        if self._lists and any(
            group["params"] is not one
            for group, one in zip(self.optimizer.param_groups, self._lists, strict=False)
        ):
            self._lists = []
            self.notice(reports.optimizer_report.PARTS_IN_GROUPS)

    def accept_groups(self) -> None:
        """Take the optimizer's present parameters; right where each rank steps whole weights."""
        self._held = count_parameters(self.optimizer)

    def updated(self, step: int, *, skipped: bool) -> None:
        """Check the first update.

        Raises:
            ConfigError: the optimizer moved nothing, or its state cannot be saved.
        """
        if skipped:
            return
        if not self.movement.done and self.movement.moved() is False:
            raise reports.optimizer_report.no_movement_error()
        if not self.state_checked:
            names: dict[Any, str] = {p.parameter: n for n, p in self.program.local.items()}
            names.update({p: n for n, p in self.program.frozen.items()})
            # Refuses now what the first save could not write.
            state = split_state(self.optimizer, names)[0]
            check_savable({name: dtype_of(tensor) for name, tensor in state.items()}, "optimizer")
            self.state_checked = True

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        if self._loading is not None:
            self._loading.remove()

    def _refuse_state(self, *_what: object) -> None:
        raise reports.optimizer_report.sharded_state_error(self.program.plan.layout.text())


class MovementCheck:
    """One-time check that the optimizer trains this model: a parameter with a gradient must move.

    An optimizer that keeps its own copies, built before a model was cast or moved, steps over
    tensors that no forward pass uses. Before the first real update the check copies a few small
    parameters whose update cannot vanish in rounding; after it one of them must differ. Updates
    that may vanish (a warm-up that starts at lr 1e-9) prove nothing: the check waits for a later
    one.
    """

    WATCHED, WATCHED_BYTES = 8, 2**20

    def __init__(self) -> None:
        self.done = False
        self.before: list[tuple[nn.Parameter, torch.Tensor]] = []

    def copy_weights(self, program: Program, optimizer: torch.optim.Optimizer) -> None:
        """Copy the smallest parameters that must move now; call it once gradients are final."""
        lr_of: dict[int, float] = {}
        for group in optimizer.param_groups:
            lr_of.update({id(p): float(group.get("lr", 1.0) or 0.0) for p in group["params"]})
        self.before = []
        stepped = [local.parameter for local in program.local.values()]
        for parameter in sorted(stepped, key=lambda p: p.numel()):
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
        """Return whether a copied parameter moved in the update; None if none was copied."""
        watched, self.before = self.before, []
        if not watched:
            return None
        self.done = True
        return any(not torch.equal(p.detach(), old) for p, old in watched)
