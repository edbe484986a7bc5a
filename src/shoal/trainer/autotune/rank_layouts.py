"""Rank the layouts of a run that leaves its layout open, from facts of its model and the planner.

Rank 0 chooses and broadcasts the layout, so that all ranks use the same one. A run keeps the layout
that was chosen once for its number of processes, whatever is measured later: a restart must resume
bit for bit. If the model cannot be traced, or the machine was never measured, the selection guide
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
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.estimates.facts import usable_cores
from shoal.base.layouts.policies import POLICIES, BlocksPolicy, OptimizerPolicy
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.base.text.units import seconds_text
from shoal.config.resolve import collect_layout_keys
from shoal.config.sections import Config, LayoutSection
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.forecast.machines.measured_machine import read_measured
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.search.case_settings import case_settings, optimizer_state_bytes
from shoal.forecast.search.layout_search import LayoutCandidate, fastest_micro_batch, search_layouts
from shoal.forecast.search.search_space import layout_section, search_space
from shoal.parallel import precision as formats
from shoal.planning.recorded_plan import read_recorded_plan
from shoal.planning.settle import (
    Words,
    is_layout_open,
    policies_compatible,
    settle_batch,
    split_policies,
)
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trainer.step.call_contract import Loss, split_batch
from shoal.wire.phases import phase

SHOWN = 3
"""Number of further layouts that the line names."""


class ModelFactsGetter(Protocol):
    """Function that returns a model's facts for a kind of kernels and an element width."""

    def __call__(self, *, kernels: str, element_bytes: int) -> ModelFacts:
        """Trace the model, or return the cached facts."""


@phase("plan")
def choose_run_layout(
    config: Config,
    facts: ModelFactsGetter,
    world: World,
    folder: Path,
    *,
    is_open_size: bool = False,
) -> tuple[Plan, Words | None]:
    """Read the plan that the start left in a run's folder, and choose its layout if it is open.

    Args:
        config: the run's.
        facts: returns the model's facts when they are needed (`facts_of`).
        world: all ranks.
        folder: the run folder, with plan.json.
        is_open_size: choose the micro-batch with the layout (`micro_batch_size.is_left_open`).

    Returns:
        (plan, None). If nothing can be ranked, the plan and the words from which the guide settles
        it.
    """
    plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    asked = collect_layout_keys(config.layout)
    open_plan = replace(plan, why="")  # the guide writes a new reason, from the model itself
    if not is_layout_open(asked) or read_recorded_plan(folder, world.size):
        return plan, None
    if world.size == 1:
        return open_plan, asked
    if is_open_size:  # it depends on the best layout
        plan = replace(plan, micro_batch=0)
    compute = formats.resolve_format(plan.compute, world.device)
    model = partial(facts, element_bytes=WIDTHS[compute])
    found = choose_best_plan(model, plan, config.layout, case_settings(config), world)
    return (found, None) if found else (open_plan, asked)


def trace_facts_from_sample(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    loss: Loss | None,
    call: str,
    *,
    kernels: str,
    element_bytes: int,
    blocks: BlocksPolicy,
    residual: str = "fp32",
    name: str = "",
) -> ModelFacts:
    """Trace a model on the shapes of a batch of a few samples, as `run.step` takes it.

    Args:
        model: the model, or its builder.
        sample: the batch.
        loss: the run's loss, or None.
        kernels, element_bytes: as `facts_of`.
        call, blocks, residual: as `shoal.parallelize`.
        name: of the model, for messages.

    Raises:
        PlanError: the model cannot run on shapes alone; names the module.
    """
    inputs, targets = split_batch(sample)
    return trace_facts(
        model,
        dict(inputs) if call == "kwargs" else (inputs,),
        kernels=kernels,
        element_bytes=element_bytes,
        autocast=element_bytes == 2,  # products alone are narrow, see parallel/precision.py
        residual=residual,
        loss=loss,
        blocks=blocks,
        targets=targets,
        name=name,
    )


def model_location(model: nn.Module | Callable[[], nn.Module]) -> str:
    """Return where a model is before the run: "builder", "host" or "device".

    >>> (
    ...     model_location(nn.Linear),
    ...     model_location(nn.Linear(1, 1)),
    ...     model_location(nn.Linear(1, 1, device="meta")),
    ... )
    ('builder', 'host', 'builder')
    """
    if not isinstance(model, nn.Module):
        return "builder"
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds <= {"meta"}:  # shapes alone stand for what a function would build
        return "builder"
    return "host" if kinds <= {"cpu", "meta"} else "device"


@phase("plan")
def choose_loop_layout(
    module: nn.Module,
    sample: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    said: Words,
    world: World,
) -> Plan | None:
    """Choose the layout of a user's own loop as for `shoal train`; None if nothing can be ranked.

    Args:
        module: the model.
        sample: a batch, as `run.step` takes it, or a function that returns one, called once a rank.
        loss: the run's loss.
        optimizer: the run's optimizer.
        plan: with its batch and its formats.
        said: words that leave the layout open (`leaves_layout_open`).
        world: all ranks.
    """
    plan, words = split_policies(plan, said)
    given = sample() if callable(sample) else sample
    model = partial(
        trace_facts_from_sample,
        module,
        given,
        loss,
        plan.call,
        element_bytes=WIDTHS[plan.compute],
        blocks=plan,
        residual=plan.residual,
    )
    return choose_best_plan(
        model, plan, layout_section(words), loop_case_settings(module, optimizer), world
    )


def loop_case_settings(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return further settings of a `PlanningCase` for a user's own loop."""
    group = optimizer.param_groups[0]
    rule = OptimizerPolicy(name=type(optimizer).__name__, momentum=float(group.get("momentum", 0)))
    return {
        "loss": "full",
        "optimizer_bytes": optimizer_state_bytes(rule),
        "handed": model_location(module),
    }


def read_measured_cluster(processes: int, device: torch.device) -> Cluster | None:
    """Return this machine as measured on the ranks' kind of device; None if it never was."""
    kind = "gpu" if is_accelerator(device) else "cpu"
    return read_measured(cache_folder(), processes, kind, torch.get_num_threads())


def choose_best_plan(
    model: Callable[..., ModelFacts],
    plan: Plan,
    section: LayoutSection,
    further: Mapping[str, Any],
    world: World,
) -> Plan | None:
    """Return rank 0's best plan, on every rank; None if nothing can be ranked."""

    def rank() -> Plan | None:
        cluster = read_measured_cluster(world.size, world.device)
        if cluster is None:
            return None
        settled = replace(plan, compute=formats.resolve_format(plan.compute, world.device))
        given = frozenset(POLICIES)
        space = search_space(
            section, cluster, micro_batch=plan.micro_batch, given=given, built=True
        )
        try:
            case = PlanningCase(model(kernels=cluster.device.kind), cluster, settled, **further)
            candidates = filter_startable(search_layouts(case, space))
            if not candidates:
                return None
            best, why = candidates[0].case, _explain_choice(candidates, world.size)
            size = plan.micro_batch or fastest_micro_batch(best, measured=True)
            return settle_batch(replace(plan, layout=best.layout, micro_batch=size, why=why))
        except ShoalError:
            return None

    found = rank() if world.is_first else None
    told = world.broadcast_json(found.to_json() if found else "")
    return Plan.from_json(told) if told else None


def filter_startable(candidates: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the candidates that fit, and whose layout supports the other requested settings."""
    return [c for c in candidates if c.fits and policies_compatible(c.case.plan)]


def _explain_choice(candidates: list[LayoutCandidate], processes: int) -> str:
    """Return the line for the user about the chosen layout."""
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
