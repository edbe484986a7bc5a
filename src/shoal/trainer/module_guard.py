"""Modules that no run can begin with, refused in one line before anything is divided.

    a lazy layer          it has no shapes yet: one forward pass gives them
    the meta device       weights without values: nothing says which they shall be
    in a run already      two runs would both sum its gradients (a notebook's cell, run twice)
    sharded already       by FSDP2, or by a run under fsdp that is closed
    other numbers         dropout of 0.1 on one rank and 0.3 on another: ranks train unlike models

Hooks on gradients of weights (`weight.register_hook(lambda g: g * mask)`) are told what they see
here, and refused where they never run: they run in the backward pass of every micro-batch, on every
rank, before anything is summed; and the loss is a sum over targets, not a mean. A factor or a mask
computes what it would in one process. A clamp does not: it sees other numbers. Under fsdp, and
where tp cuts a weight, what gets the gradient is a part or a copy: the hook would be left out.

`parallelize` asks before it builds a layout, and for the last one once all ranks have met.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from shoal.base.errors import ConfigError, PlanError
from shoal.data.step import StepBatch
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer._torch import gradient_hooks
from shoal.trainer.suspicions import evaluation_line

_in_a_run: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def enter_run(module: nn.Module, program: Program) -> Program:
    """Mark a module as one that a run trains, until the program is closed.

    Its `state_dict()` is that of the weights that are stepped, wherever they lie.
    """
    if program.parts or program.cuts or any(p.is_meta for p in module.parameters()):
        from shoal.trainer.whole_state import give_masters

        program = give_masters(program)
    _in_a_run.add(module)
    leave = functools.partial(_in_a_run.discard, module)
    return replace(program, on_close=(*program.on_close, leave))


def refuse_unready(module: nn.Module) -> None:
    """Errors: ConfigError for a module that has no weights to train, or that a run has already."""
    if any(part in _in_a_run for part in module.modules()):
        raise ConfigError(
            "model: a run trains it already, and two would both sum its gradients; try: "
            "run.close() on that one first, or build the model again"
        )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"model: {name} has no shape yet, its layer is a lazy one; try: one forward "
                f"pass, model(inputs), before shoal.parallelize"
            )
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"model: {name} is sharded already, by fully_shard or by a run that is closed; "
                f"try: the module as it was built"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"model: {name} is on the meta device and has no values; try: a function that "
                f'builds the model, or model.to_empty(device="cpu") and its weights loaded'
            )


def layers_of(module: nn.Module) -> list[str]:
    """What torch's layers say of themselves: sizes, dropout, epsilons, a line for each."""
    return [
        f"{name or 'itself'} is {type(part).__name__}({part.extra_repr()})"
        for name, part in module.named_modules()
        if type(part).__module__.startswith("torch.nn.")
    ]


def refuse_unlike(module: nn.Module, world: World, step: int = 0) -> None:
    """Compare over ranks what their layers say of themselves.

    step     before which they were equal, for a run that is under way
    Errors   PlanError, the same on all ranks, naming the first layer that differs
    """
    if world.size == 1:
        return
    unlike = world.differing(layers_of(module))
    if unlike is None:
        return
    rank, first, other = unlike
    where, nearest = (
        (f"step {step}: the model changed", "try: the same change on every rank")
        if step
        else (
            "model",
            "every rank must build the same model: look for a builder that reads the rank or the "
            "environment",
        )
    )
    place = next(
        (n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),  # one has a layer more
    )
    here, there = ([*one, "not there"][place] for one in (first, other))
    at, away = world.ranks[0], world.ranks[rank]
    raise PlanError(f"{where}: layer {here} on rank {at}, and {there} on rank {away}; {nearest}")


def hooked(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of those that have a hook on their gradient."""
    return [name for name, parameter in parameters.items() if gradient_hooks(parameter)]


def check_hooks(names: Collection[str], program: Program) -> list[str]:
    """Tell what hooks see under the program's layout, in a line, if there are any.

    names    of `hooked`, when the module was not divided yet
    Errors   PlanError for one that would never run
    """
    layout = program.plan.layout
    for name in names:
        here = program.parameters.get(name)
        if here is None:
            continue  # it trains on another rank, with its hook
        divided = layout.zero == 3 or layout.threads > 1 or name in program.cuts
        if divided or not gradient_hooks(here):
            raise PlanError(
                f"model: {name} has a gradient hook (register_hook), and under {layout.text()} the "
                f"gradient goes to a part or a copy of it, so the hook would be left out; try: "
                f"clip=… of shoal.parallelize in the place of a clamp, or layout=zero2"
            )
    if not names:
        return []
    count = f"{len(names)} weight{'s' if len(names) > 1 else ''}"
    return [
        f"model: {count} with a gradient hook, first {next(iter(names))}: it sees sums over the "
        f"targets of one micro-batch, and no mean; a factor or a mask is right, a clamp is not: "
        f"try: clip=… of shoal.parallelize"
    ]


class ModelChecks:
    """The lines of one run on its model.

    Args:
        program: the run's.
        cut_by_default: nobody gave a micro-batch, so a loader cuts by the default one.
        notice: prints a line, by rank 0.

    Attributes:
        cut_by_default: as above, until it was looked at.
    """

    def __init__(
        self, program: Program, cut_by_default: bool, notice: Callable[[str], None]
    ) -> None:
        self.program, self.cut_by_default, self.notice = program, cut_by_default, notice
        self._hooked = hooked(program.parameters)  # of those it was told
        self._evaluates = False

    def look(self, batch: Any, *, first: bool) -> None:
        """Look at the model before a step.

        Args:
            batch: what the step is given.
            first: no step of this run is over.

        Raises:
            PlanError: a hook on a gradient would never run.
        """
        module = self.program.module
        if not self._evaluates and (line := evaluation_line(module)):
            self._evaluates = True
            self.notice(line)
        if not first:
            return
        hooks = [name for name in hooked(self.program.parameters) if name not in self._hooked]
        for line in check_hooks(hooks, self.program):
            self.notice(line)
        plan = self.program.plan
        is_cut = plan.micro_batch * plan.layout.data_degree < plan.batch
        if self.cut_by_default and is_cut and isinstance(batch, StepBatch):
            from shoal.trainer.model_notices import batch_norm_line

            self.cut_by_default = False
            if line := batch_norm_line(module, plan):
                self.notice(line)
