"""Ranks the layouts of a run that leaves its layout open: facts of its model, then the planner.

Rank 0 looks and tells the others, so that all ranks take the same layout. A run that was chosen for
once keeps its layout on as many processes, whatever has been measured since: a restart must go on
bit for bit. Where the model cannot be traced or the machine was never measured, the selection guide
decides (planning/layout_guide.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.errors import ShoalError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import Case, ModelFacts
from shoal.base.estimates.facts import usable_cores
from shoal.base.layouts.policies import POLICIES, BlocksPolicy, OptimizerPolicy
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.base.text.units import seconds_text
from shoal.config.resolve import asked_layout
from shoal.config.sections import Config, LayoutSection
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.forecast.machines.measured_machine import read_measured
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.search.case_settings import beside, state_bytes_of
from shoal.forecast.search.layout_search import Candidate, fastest_micro_batch, search
from shoal.forecast.search.search_space import section_of, space_of
from shoal.parallel import precision as formats
from shoal.planning.recorded_plan import kept_plan
from shoal.planning.settle import (
    Words,
    goes_together,
    is_open,
    settle_batch,
    split_words,
)
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trainer.step.call_contract import Loss, split_batch
from shoal.wire.phases import phase

SHOWN = 3
"""Further layouts that the line names."""


class FindFacts(Protocol):
    """Finds a model's facts for a device's kernels and a width of its elements (`facts_of`)."""

    def __call__(self, *, kernels: str, element_bytes: int) -> ModelFacts:
        """Trace it, or give what was found before."""


@phase("plan")
def choose(
    config: Config, facts: FindFacts, world: World, folder: Path, *, is_open_size: bool = False
) -> tuple[Plan, Words | None]:
    """Take the plan that the start left in a run's folder, and choose its layout if that is open.

    Args:
        facts: finds the model's, once they are needed (`facts_of`).
        is_open_size: the micro-batch is chosen with the layout (`micro_batch_size.is_left_open`).

    Returns:
        (plan, None); where nothing can be ranked, the plan with the words from which the guide
        settles it.
    """
    plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    asked = asked_layout(config.layout)
    open_plan = replace(plan, why="")  # the guide speaks anew, of a model that it can count
    if not is_open(asked) or kept_plan(folder, world.size):
        return plan, None
    if world.size == 1:
        return open_plan, asked
    if is_open_size:  # it follows the layout that is found best
        plan = replace(plan, micro_batch=0)
    compute = formats.resolve(plan.compute, world.device)
    model = partial(facts, element_bytes=WIDTHS[compute])
    found = best_plan(model, plan, config.layout, beside(config), world)
    return (found, None) if found else (open_plan, asked)


def facts_by_sample(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    loss: Loss | None,
    call: str,
    *,
    kernels: str,
    element_bytes: int,
    blocks: BlocksPolicy,
    name: str = "",
) -> ModelFacts:
    """Trace a model on the shapes of a batch of a few samples, as `run.step` takes it.

    Args:
        kernels, element_bytes: as `facts_of`.
        call, blocks: as `shoal.parallelize`.

    Raises:
        PlanError: for a model that shapes alone cannot run, naming the module.
    """
    inputs, targets = split_batch(sample)
    return trace_facts(
        model,
        dict(inputs) if call == "kwargs" else (inputs,),
        kernels=kernels,
        element_bytes=element_bytes,
        autocast=element_bytes == 2,  # products alone are narrow, see parallel/precision.py
        loss=loss,
        blocks=blocks,
        targets=targets,
        name=name,
    )


def handed(model: nn.Module | Callable[[], nn.Module]) -> str:
    """Where a model that is given is before the run, in the words of a `Case`.

    >>> handed(nn.Linear), handed(nn.Linear(1, 1)), handed(nn.Linear(1, 1, device="meta"))
    ('builder', 'host', 'builder')
    """
    if not isinstance(model, nn.Module):
        return "builder"
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds <= {"meta"}:  # shapes alone stand for what a function would build
        return "builder"
    return "host" if kinds <= {"cpu", "meta"} else "device"


@phase("plan")
def choose_for(
    module: nn.Module,
    sample: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    said: Words,
    world: World,
) -> Plan | None:
    """Choose for a loop of one's own as for `shoal train`; None where nothing can be ranked.

    Args:
        sample: a batch, as `run.step` takes it, or a function that gives one, called once a rank.
        plan: with its batch and its formats.
        said: leaves the layout open (`leaves_open`).
    """
    plan, words = split_words(plan, said)
    given = sample() if callable(sample) else sample
    model = partial(
        facts_by_sample,
        module,
        given,
        loss,
        plan.call,
        element_bytes=WIDTHS[plan.compute],
        blocks=plan,
    )
    return best_plan(model, plan, section_of(words), own_settings(module, optimizer), world)


def own_settings(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what else a `Case` of a loop of one's own has (`case_settings.beside` of a run's)."""
    group = optimizer.param_groups[0]
    rule = OptimizerPolicy(name=type(optimizer).__name__, momentum=float(group.get("momentum", 0)))
    return {"loss": "full", "optimizer_bytes": state_bytes_of(rule), "handed": handed(module)}


def measured_here(processes: int, device: torch.device) -> Cluster | None:
    """This machine as it was measured on the kind of device that ranks compute on; None: never."""
    kind = "gpu" if is_accelerator(device) else "cpu"
    return read_measured(cache_folder(), processes, kind, torch.get_num_threads())


def best_plan(
    model: Callable[..., ModelFacts],
    plan: Plan,
    section: LayoutSection,
    further: Mapping[str, Any],
    world: World,
) -> Plan | None:
    """What rank 0 finds best, on every rank; None where nothing can be ranked here."""

    def rank() -> Plan | None:
        cluster = measured_here(world.size, world.device)
        if cluster is None:
            return None
        settled = replace(plan, compute=formats.resolve(plan.compute, world.device))
        given = frozenset(POLICIES)
        space = space_of(section, cluster, micro_batch=plan.micro_batch, given=given, built=True)
        try:
            case = Case(model(kernels=cluster.device.kind), cluster, settled, **further)
            candidates = startable(search(case, space))
            if not candidates:
                return None
            best, why = candidates[0].case, _why(candidates, world.size)
            size = plan.micro_batch or fastest_micro_batch(best, measured=True)
            return settle_batch(replace(plan, layout=best.layout, micro_batch=size, why=why))
        except ShoalError:
            return None

    found = rank() if world.is_first else None
    told = world.broadcast_json(found.to_json() if found else "")
    return Plan.from_json(told) if told else None


def startable(candidates: list[Candidate]) -> list[Candidate]:
    """Those that fit, and that can carry what else was asked for."""
    return [c for c in candidates if c.fits and goes_together(c.case.plan)]


def _why(candidates: list[Candidate], processes: int) -> str:
    """The line for the user."""
    best = candidates[0]
    names: set[str] = set()
    others = []
    for candidate in candidates[1:]:
        name = candidate.case.layout.strategy
        if name not in names | {best.case.layout.strategy}:
            names.add(name)
            others.append(f"{name} {seconds_text(candidate.time.step_s)}")
    rest = f"; also possible: {', '.join(others[:SHOWN])}" if others else ""
    cores = usable_cores()
    on_cores = best.case.cluster.device.kind == "cpu" and cores <= processes
    aside = f" (on {cores} cores one process may be as fast)" if on_cores else ""
    return (
        f"auto: {best.case.layout.strategy} on {processes} processes: "
        f"{seconds_text(best.time.step_s)} per step foreseen{rest}{aside}"
    )
