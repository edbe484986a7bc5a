"""Refuse modules that no run can train, with one line, before anything is sharded.

    a lazy layer          it has no shapes yet: run one forward pass first
    the meta device       weights without values, and no file or builder that has them
    in a run already      two runs would both sum its gradients (a notebook's cell, run twice)
    sharded already       by FSDP2, or by a run under fsdp that is closed
    other numbers         dropout of 0.1 on one rank and 0.3 on another: ranks train other models

A notice explains hooks on gradients of weights (`weight.register_hook(lambda g: g * mask)`). They
run in the backward pass of every micro-batch, on every rank, before anything is summed; and the
loss is a sum over targets, not a mean. A factor or a mask computes the same as in one process. A
clamp does not: it sees other numbers. Under fsdp, and where tp splits a weight, the gradient goes
to a part or a copy, so the hook would never run: this raises an error.

`parallelize` runs these checks before it builds a layout, the last one after all ranks have joined.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.base.errors import ConfigError
from shoal.base.plans.plan import Plan
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World
from shoal.parallel._torch import BatchNorm
from shoal.parallel.mutated_weights import refuse_mutated_weights
from shoal.parallel.program import Program
from shoal.trace.isolation.module_copies import copy_module, refuse_shared_parts
from shoal.trainer._torch import (
    count_accumulation_hooks,
    count_backward_hooks,
    count_gradient_hooks,
    is_profiled,
    list_hooks,
)
from shoal.trainer.guards import reports
from shoal.trainer.guards.first_step_checks import evaluation_mode_notice
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.call_contract import Loss, is_default
from shoal.trainer.step.step_vector import StepNumbers

if TYPE_CHECKING:
    from shoal.trainer.guards.model_trial import ModelTrial
    from shoal.trainer.guards.reports.model_notices import FirstBatch

_in_a_run: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_in_run(module: nn.Module, program: Program) -> Program:
    """Mark a module as one that a run trains, until the program is closed.

    Its `state_dict()` is that of the weights that are stepped, wherever they lie.
    """
    if program.parts or program.cuts or any(p.is_meta for p in module.parameters()):
        from shoal.trainer.full_state_dict import register_master_hooks

        program = register_master_hooks(program)
    _in_a_run.add(module)
    leave = functools.partial(_in_a_run.discard, module)
    return replace(program, on_close=(*program.on_close, leave))


def refuse_unready(module: nn.Module) -> None:
    """Raise ConfigError for a module without weights to train, or one that another run trains."""
    if any(part in _in_a_run for part in module.modules()):
        raise ConfigError(
            "model: a run trains it already, and two would both sum its gradients; try: "
            "run.close() on that one first, or build the model again"
        )
    if scripted := [one for one in module.modules() if isinstance(one, torch.jit.ScriptModule)]:
        raise ConfigError(
            f"model: {type(scripted[0]).__name__} of torch.jit, which no layout can look into; "
            f"try: the module that it was made of"
        )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter) or hasattr(parameter, "device_mesh") or parameter.is_meta:
            reports.start_report.refuse_parameter(name, parameter)


def describe_layers(module: nn.Module) -> list[str]:
    """Return a line for each torch layer with its `extra_repr`: sizes, dropout, epsilons."""
    return [
        f"{name or 'itself'} is {type(part).__name__}({part.extra_repr()})"
        for name, part in module.named_modules()
        if type(part).__module__.startswith("torch.nn.")
    ]


def refuse_different_layers(module: nn.Module, world: World, step: int = 0) -> None:
    """Compare over ranks the settings of their layers.

    Args:
        module: the model.
        world: the ranks that compare.
        step: the run's step before which they were equal; 0: the run has not begun.

    Raises:
        PlanError: names the first layer that differs; the same on all ranks.
    """
    if world.size == 1:
        return
    unlike = world.find_differing_rank(describe_layers(module))
    if unlike is None:
        return
    reports.start_report.refuse_layers(unlike, world.ranks, step)


def check_layers(module: nn.Module, world: World) -> None:
    """Compare layers over ranks before a run begins, and copy a small model for a later trial.

    Raises:
        PlanError: layers differ; the same on all ranks.
    """
    refuse_different_layers(module, world)
    if world.is_first:
        copy_for_trial(module)


def copy_for_trial(module: nn.Module) -> None:
    """Copy a model that is still whole, for the trial of the next run over it; not a large one.

    Args:
        module: the model.
    """
    layers = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    elements = sum(one.numel() for one in tensors)
    if any(one.is_meta for one in tensors) or elements > LARGE or len(layers) > LAYERS:
        return
    known: dict[int, Any] = {  # torch cannot copy its generators
        id(value): value.clone_state()
        for layer in layers
        for value in vars(layer).values()
        if isinstance(value, torch.Generator)
    }
    try:
        copied = copy_module(module, known)
        refuse_shared_parts(module, copied)  # before its mode and hooks are changed
    except Exception:  # it has what nobody can copy: a lock, a file, a group of processes
        return
    for layer in copied.eval().modules():
        for hooks in list_hooks(layer):
            hooks.clear()
    COPIES[module] = copied


def pop_copy(program: Program) -> nn.Module | None:
    """Return the copy of a run's model for its trial, if there is one."""
    copied, plan = COPIES.pop(program.module, None), program.plan
    return copied if plan.guards == "on" and plan.layout.cp == 1 else None


COPIES: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""Copies of models whose run has not begun."""
LARGE, LAYERS = 1 << 20, 300
"""Elements and modules of a model that is copied, at most."""


def list_hooked_weights(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return names of parameters that have a hook on their gradient."""
    return [name for name, parameter in parameters.items() if count_gradient_hooks(parameter)]


def check_hooks(names: Collection[str], program: Program) -> list[str]:
    """Return a notice on what gradient hooks see under the program's layout, if there are any.

    Args:
        names: of `list_hooked_weights`, before the module was sharded.
        program: the run's.

    Raises:
        PlanError: a hook would never run.
    """
    layout = program.plan.layout
    for name in names:
        here = program.parameters.get(name)
        if here is None:
            continue  # it trains on another rank, with its hook
        divided = layout.zero == 3 or layout.threads > 1 or name in program.cuts
        divided = divided or (layout.zero == 2 and count_accumulation_hooks(here) > 0)
        if divided or not count_gradient_hooks(here):
            reports.start_report.refuse_hook(name, layout.text())
    if not names:
        return []
    return [reports.start_report.hooks_line(list(names))]


def unlike_loss_notices(world: World, loss: Loss, module: nn.Module, plan: Plan) -> list[str]:
    """Return a notice if tensors that a loss uses differ between ranks; every rank calls it.

    Args:
        world: all ranks.
        loss: the run's.
        module: its model.
        plan: its plan.
    """
    if world.size == 1 or is_default(loss) or plan.guards == "off":
        return []
    from shoal.trainer.guards.loss_trial import unlike_loss_lines

    return unlike_loss_lines(world, loss, module)


class ModelGuard(Guard):
    """Guard against evaluation mode, hooks that never run, and weights that a forward pass writes.

    Args:
        program: the run's.
        cut_by_default: the user set no micro-batch, so a loader uses the default one.
        notice: prints a line, by rank 0.
        stage_notice: prints a line of the stage of a pipeline that has what it is about.

    Attributes:
        cut_by_default: as above, until it was checked.
        coupled: samples of a micro-batch are compared on purpose.
    """

    coupled = False

    def __init__(
        self,
        program: Program,
        cut_by_default: bool,
        notice: Callable[[str], None],
        stage_notice: Callable[[str], None],
    ) -> None:
        self.program, self.cut_by_default, self.notice = program, cut_by_default, notice
        self.stage_notice = stage_notice
        self._copy = pop_copy(program) if program.world.is_first else None
        self._made: ModelTrial | None = None
        self._hooked = list_hooked_weights(program.parameters)  # their notice is printed
        self._evaluates, self._is_first = False, True
        self._passes, self._batch = 0, cast("Any", None)
        self._first: FirstBatch | None = None

    def trial(self) -> ModelTrial | None:
        """Return the copy of a small model in the first step, if no coupling is meant."""
        if self.coupled or self._copy is None or is_profiled():
            return None
        from shoal.trainer.guards.model_trial import ModelTrial  # of several micro-batches

        self._made = self._made or ModelTrial(self._copy, self.program.plan.call)
        return self._made

    def before(self, step: int, batch: Any) -> None:
        """Check the model before a step.

        Raises:
            PlanError: a hook on a gradient would never run.
        """
        if batch is None:  # a loop that calls the model itself
            return
        module = self.program.module
        if not self._evaluates and (line := evaluation_mode_notice(module)):
            self._evaluates = True
            self.notice(line)
        self._batch = batch if self._copy is not None else None
        if not self._is_first:
            return
        layout = self.program.plan.layout
        if max(layout.tp, layout.cp, layout.ep) > 1:
            from shoal.trainer.guards._torch import count_global_hooks

            if count_global_hooks():
                self.notice(reports.model_notices.global_hooks_line(layout.text()))
        hooks = [
            name
            for name in list_hooked_weights(self.program.parameters)
            if name not in self._hooked
        ]
        for line in check_hooks(hooks, self.program):
            self.stage_notice(line)
        if hooked := [n for n, part in module.named_modules() if count_backward_hooks(part)]:
            self.stage_notice(reports.model_notices.backward_hooks_line(hooked))
        loaded = isinstance(batch, StepBatch)
        if (self.cut_by_default or not loaded) and any(map(_has_buffers, module.modules())):
            self.cut_by_default = self.cut_by_default and not loaded
            self._first = reports.model_notices.FirstBatch(self.program, is_own=not loaded)

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None] | None:
        """Return a context that finds weights written by a forward pass, in the first step."""
        self._passes = micro_batches
        return refuse_mutated_weights(self.program, self._note_write) if self._is_first else None

    def _note_write(self, name: str) -> None:
        """Print a line for a weight that a forward pass writes, where there are several."""
        if self._passes > 1 or self.program.data.size > 1:
            self.notice(reports.writes_report.own_writes_line(name, self._passes))

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """End the first passes: the user's own batch may have been several micro-batches."""
        if self._first is not None:
            self._first.print_notices(self._passes, self.stage_notice)
            self._first = None
        self._is_first = False
        batch, self._batch = self._batch, None
        if is_profiled():  # the copy's passes are none of the step's: a later step tries it
            return
        several = self._passes > 1 or self.program.data.size > 1
        bends = batch is not None and may_bend_gradients(self.program.module)
        trial = self.trial() if batch is not None and (several or bends) else None
        self._copy = self._made = None
        if trial is None:
            return
        if several and trial.compares_samples(self.program, batch):
            self.notice(reports.model_notices.compared_samples_line())
        if bends:
            from shoal.trainer.guards.bent_gradients import find_bent_gradient

            if name := find_bent_gradient(trial, self.program, batch):
                self.notice(reports.model_notices.bent_gradient_line(name))


def may_bend_gradients(module: nn.Module) -> bool:
    """Return whether a script has backward functions of its own, or hooks in a forward pass."""
    roots = {one.__module__.partition(".")[0] for one in torch.autograd.Function.__subclasses__()}
    if roots - {"torch", "shoal", "transformers", "torchvision"}:
        return True
    codes = [getattr(type(part).forward, "__code__", None) for part in module.modules()]
    return any(code is not None and "register_hook" in code.co_names for code in codes)


def _has_buffers(part: nn.Module) -> bool:
    """Return whether a layer may compute or keep something of a whole micro-batch."""
    return bool(part._buffers) or isinstance(part, BatchNorm)
