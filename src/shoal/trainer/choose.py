"""`auto`: the planner ranks what this version runs on this machine, and the best is taken.

Rank 0 looks and tells the others, so that all ranks take the same layout. A run that was chosen for
once keeps its layout on as many processes, whatever has been measured since: a restart must go on
bit for bit. Where the model cannot be traced or the machine was never measured, the selection guide
decides (planner/guide.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import ShoalError
from shoal.base.facts import usable_cores
from shoal.base.files import cache_folder
from shoal.base.layout import AXES, Layout
from shoal.base.lines import read_object
from shoal.base.phases import phase
from shoal.base.policies import TensorPolicy, check_compress
from shoal.base.units import seconds_text
from shoal.config.resolve import asked_layout, portions
from shoal.config.sections import Config
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.parallel import precision as formats
from shoal.planner.case_settings import case_settings
from shoal.planner.measured import read_measured
from shoal.planner.search import Asked, Candidate, search
from shoal.planner.states import WIDTHS
from shoal.trainer.foresee import facts_of

Choice = tuple[dict[str, Any], str]
"""What `parallelize` takes as layout, and the line that says why ("" where it says so itself)."""

SHOWN = 3
"""Further layouts that the line names."""


@phase("plan")
def choose(config: Config, source: Source, world: World, folder: Path) -> Choice:
    """The layout of a run: as asked for, or the planner's choice if `auto` is asked for.

    folder   the run's, whose plan.json tells what was chosen before
    """
    asked = asked_layout(config.layout)
    if not is_open(asked) or world.size == 1:
        return asked, ""
    found = world.broadcast_json(_choose(config, source, world, folder) if world.is_first else None)
    if not found:
        return asked, ""
    beside = {key: value for key, value in asked.items() if key in BESIDE}
    return {**found["layout"], **beside}, found["why"]


BESIDE = tuple(one.name for one in fields(TensorPolicy))
"""Keys of [layout] that say how layers would be split, and choose no layout."""


def is_open(asked: Mapping[str, Any]) -> bool:
    """Returns whether the planner chooses: neither a strategy nor a degree is given.

    A stage (layout.zero) alone leaves open what carries it.

    >>> is_open({"strategy": "auto", "zero": 2}), is_open({"strategy": "auto", "tp": 2})
    (True, False)
    """
    return asked["strategy"] == "auto" and not asked.keys() - {"strategy", "zero", *BESIDE}


def _choose(config: Config, source: Source, world: World, folder: Path) -> dict[str, Any] | None:
    if kept := _kept(folder, world.size):
        return kept
    cluster = read_measured(cache_folder(), world.size, threads=torch.get_num_threads())
    if cluster is None:
        return None
    compute = formats.resolve(config.precision.compute, world.device)
    batch, micro_batch = portions(config.train)
    try:
        model = facts_of(config, source, kernels=cluster.device.kind, element_bytes=WIDTHS[compute])
        asked = Asked(
            batch=batch,
            micro_batch=micro_batch,
            zero=None if config.layout.zero < 0 else config.layout.zero,
            **case_settings(config, compute),
            built=True,
        )
        candidates = [c for c in search(model, cluster, asked) if c.fits and _carries(config, c)]
    except ShoalError:
        return None
    if not candidates:
        return None
    best = candidates[0]
    return {"layout": degrees_of(best.case.layout), "why": _why(candidates, world.size)}


def _kept(folder: Path, processes: int) -> dict[str, Any] | None:
    """What an earlier start of this run chose on as many processes."""
    plan = read_object(folder / "plan.json")
    try:
        layout = Layout(**plan["layout"])
        if plan["chosen"] and layout.processes == processes:
            return {"layout": degrees_of(layout), "why": plan["why"]}
    except (ShoalError, ValueError, KeyError, TypeError):
        pass
    return None


def _carries(config: Config, candidate: Candidate) -> bool:
    """Whether a layout can carry what else was asked for."""
    try:
        check_compress(config.layout.compress, candidate.case.layout.strategy)
    except ShoalError:
        return False
    return True


def degrees_of(layout: Layout) -> dict[str, Any]:
    """A layout as `parallelize` takes it.

    >>> degrees_of(Layout(dp_shard=4, zero=2))
    {'dp_shard': 4, 'zero': 2}
    """
    found: dict[str, Any] = {
        axis: degree for axis in AXES if (degree := layout.degrees[axis]) > 1 and axis != "islands"
    }
    if layout.zero:
        found["zero"] = layout.zero
    return found or {"strategy": "single"}


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
