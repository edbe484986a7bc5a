"""Find weights that a model's own forward pass changes, if the layout would lose the change.

Some models limit the norm of a weight where they use it (`weight.data = renorm(weight.data)`),
others cast a router to float32 (`self.router.to(torch.float32)`). On one process that is part of
training. Some layouts keep weights in memory of their own (shards, or narrow copies). The optimizer
then steps numbers that the module no longer reads, or the next update overwrites what the model
wrote, without an error. So the first step of a run is checked.

Limits: a forward pass that changes weights in later steps only is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import ConfigError
from shoal.base.plans.plan import Plan
from shoal.parallel._torch import version_counter
from shoal.parallel.program import Program

Look = tuple[torch.dtype, int, int]
"""A weight's dtype, data pointer and version counter."""

FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
"""torch dtype → the name of that format in run.toml."""


class MutatedWeightsError(ConfigError):
    """Error for a model that changes its own weights, on a layout that would lose the change.

    Args:
        is_cast: the model changes their dtype.
    """

    def __init__(self, text: str, is_cast: bool) -> None:
        super().__init__(text)
        self.is_cast = is_cast


@contextmanager
def refuse_mutated_weights(
    program: Program, note: Callable[[str], None] = lambda name: None
) -> Iterator[None]:
    """Refuse weights that the model itself changes during the passes of a step.

    A context manager around the passes, entered by every rank. Changes that the layout keeps, as
    one process does, are allowed.

    Args:
        program: the run's.
        note: called with the name of a weight whose change the layout keeps.

    Raises:
        MutatedWeightsError: at its end, on all ranks, for a change that would be lost.
    """
    before = {name: _weight_state(p) for name, p in program.parameters.items()}
    named = program.module.named_parameters()  # frozen ones, too: a copy that follows by an average
    here = {name: p for name, p in named if not (p.is_meta or hasattr(p, "device_mesh"))}
    states = {name: _weight_state(p) for name, p in here.items()}
    yield
    said = program.world.gather_json(_first_lost_change(program, before))
    for text, is_cast in filter(None, said):
        raise MutatedWeightsError(text, is_cast)
    for name, parameter in here.items():
        if states[name] != _weight_state(parameter) and not program.plan.offloads_parameters:
            note(name)
            break


def _first_lost_change(program: Program, before: Mapping[str, Look]) -> tuple[str, bool] | None:
    """Find the first weight whose change the program would lose: (text, whether it is a cast)."""
    if program.plan.offloads_parameters:
        return None  # offload moves parameters in and out, so their data pointers change anyway
    layout = program.plan.layout
    tables = {id(m.weight) for m in program.module.modules() if getattr(m, "max_norm", None)}
    for name, parameter in program.parameters.items():
        was, now = before[name], _weight_state(parameter)
        if was == now:
            continue
        own = program.local.get(name)
        stepped = own is not None and own.parameter is parameter and layout.threads == 1
        if name in program.cuts:
            is_lost = True
        elif was[0] != now[0]:
            is_lost = not stepped or layout.processes > 1
        elif was[1] != now[1]:
            is_lost = not stepped
        else:
            is_lost = name in program.parts or layout.threads > 1
        if not is_lost and id(parameter) in tables and program.data.size > 1:
            return (
                f"{name}: max_norm shortens the rows that a pass looks up, which on "
                f"{program.data.size} ranks are those of their own samples, so their weights would "
                f"drift apart; try: torch.nn.utils.parametrize with a norm of all rows, or one "
                f"process"
            ), False
        if is_lost:
            return _describe_change(name, was, now, program.plan)
    return None


def watch_unit_weights(units: Sequence[nn.Module], program: Program) -> list[RemovableHandle]:
    """Compare the gathered weights of each unit before and after its first forward pass.

    Args:
        units: modules whose own hooks gather before these hooks run, and reshard after them.

    Returns:
        The hooks.

    Raises:
        MutatedWeightsError: in that forward pass, with the text of `refuse_mutated_weights`.
    """
    paths = {id(part): path for path, part in program.module.named_modules()}
    return [
        hook for unit in units for hook in _hook_first_forward(unit, paths[id(unit)], program.plan)
    ]


def _hook_first_forward(
    unit: nn.Module, path: str, plan: Plan
) -> tuple[RemovableHandle, RemovableHandle]:
    kept: dict[str, tuple[nn.Parameter, Look]] = {}

    def before(module: nn.Module, _given: Any) -> None:
        first.remove()
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "to_local") and not parameter.is_meta:  # not of an inner unit
                kept[name] = parameter, _weight_state(parameter)

    def after(module: nn.Module, _given: Any, _outputs: Any) -> None:
        second.remove()
        for name, parameter in module.named_parameters():
            held, was = kept.pop(name, (None, None))
            if was is not None and held is parameter and was != _weight_state(parameter):
                where = f"{path}.{name}" if path else name
                raise MutatedWeightsError(
                    *_describe_change(where, was, _weight_state(parameter), plan)
                )

    first = unit.register_forward_pre_hook(before)
    second = unit.register_forward_hook(after, prepend=True)
    return first, second


def _weight_state(parameter: nn.Parameter) -> Look:
    return parameter.dtype, parameter.data_ptr(), version_counter(parameter)


def _describe_change(name: str, was: Look, now: Look, plan: Plan) -> tuple[str, bool]:
    layout = plan.layout.text()
    if was[0] != now[0]:
        to = str(now[0]).removeprefix("torch.")
        return (
            f"{name}: the model's own forward pass turns it into {to}, and {layout} in "
            f"{plan.compute} would train on without it; try: cast values there (weight.to("
            f"torch.{to}) in the place of module.to(torch.{to})), or precision.compute="
            f"{FORMATS.get(now[0], 'fp32')}"
        ), True
    what = "puts it into other memory" if was[1] != now[1] else "writes it"
    fp32 = "" if plan.compute in ("fp32", "fp64") else " with precision.compute=fp32"
    return (
        f"{name}: the model's own forward pass {what}, and {layout} in {plan.compute} would lose "
        f"what it wrote; try: torch.nn.utils.parametrize, which computes a weight from the "
        f"one that trains, or layout.strategy=ddp{fp32}"
    ), False
