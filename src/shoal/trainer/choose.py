"""`auto`: the planner ranks what this version runs on this machine, and the best is taken.

Rank 0 looks and tells the others, so that all ranks take the same layout. A run that was chosen for
once keeps its layout on as many processes, whatever has been measured since: a restart must go on
bit for bit. Where the model cannot be traced or the machine was never measured, the selection guide
decides (planner/guide.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shoal.base.errors import ShoalError
from shoal.base.estimate import Case
from shoal.base.facts import usable_cores
from shoal.base.files import cache_folder
from shoal.base.phases import phase
from shoal.base.plan import Plan
from shoal.base.units import seconds_text
from shoal.config.resolve import asked_layout
from shoal.config.sections import Config
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.parallel import precision as formats
from shoal.planner.case_settings import beside
from shoal.planner.measured import read_measured
from shoal.planner.search import Candidate, search
from shoal.planner.search_space import ALL_POLICIES, space_of
from shoal.planner.settle import Words, check_together, is_open, kept_plan, settle_batch
from shoal.planner.states import WIDTHS
from shoal.trainer.foresee import facts_of

SHOWN = 3
"""Further layouts that the line names."""


@phase("plan")
def choose(config: Config, source: Source, world: World, folder: Path) -> tuple[Plan, Words | None]:
    """Take the plan that the start left in a run's folder, and choose its layout if that is open.

    Gives    (plan, None); where nothing can be ranked, the plan with the words from which the
             guide settles it
    """
    plan = Plan.from_json((folder / "plan.json").read_text())
    asked = asked_layout(config.layout)
    if not is_open(asked) or kept_plan(folder, world.size):
        return plan, None
    if world.size == 1:
        return plan, asked
    found = _choose(config, plan, source, world.size, world.device) if world.is_first else None
    told = world.broadcast_json(found.to_json() if found else "")
    return (Plan.from_json(told), None) if told else (plan, asked)


def _choose(
    config: Config, plan: Plan, source: Source, processes: int, device: torch.device
) -> Plan | None:
    """The best of what can be ranked here; None where nothing can."""
    cluster = read_measured(cache_folder(), processes, threads=torch.get_num_threads())
    if cluster is None:
        return None
    settled = replace(plan, compute=formats.resolve(plan.compute, device))
    width = WIDTHS[settled.compute]
    space = space_of(
        config.layout, cluster, micro_batch=plan.micro_batch, given=ALL_POLICIES, built=True
    )
    try:
        model = facts_of(config, source, kernels=cluster.device.kind, element_bytes=width)
        found = search(Case(model, cluster, settled, **beside(config)), space)
        candidates = [candidate for candidate in found if candidate.fits and _carries(candidate)]
        if not candidates:
            return None
        best = replace(plan, layout=candidates[0].case.layout, why=_why(candidates, processes))
        return settle_batch(best)
    except ShoalError:
        return None


def _carries(candidate: Candidate) -> bool:
    """Whether a layout can carry what else was asked for."""
    try:
        check_together(candidate.case.plan)
    except ShoalError:
        return False
    return True


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
