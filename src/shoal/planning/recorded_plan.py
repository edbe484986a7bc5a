"""Reads the plan that an earlier start of a run chose; a restart goes on with its layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.damaged_lines import read_object
from shoal.planning.settle import goes_together, is_open


def kept_plan(folder: Path, processes: int) -> Plan | None:
    """Read the plan that the planner chose for an earlier start of a run on as many processes.

    None where plan.json is missing or damaged, its layout was not chosen, or has other processes.

    Args:
        folder: of the run.

    Format   <run>/plan.json: a plan (`Plan.to_json`), and beside it `chosen`: the layout was left
             open, and this is the one that was taken
    """
    told = read_object(folder / "plan.json")
    try:
        plan = Plan.from_json(json.dumps(told))
        return plan if told["chosen"] and plan.layout.processes == processes else None
    except (ShoalError, ValueError, KeyError, TypeError):
        return None


def keep_choice(plan: Plan, asked: Mapping[str, Any], folder: Path) -> tuple[Plan, bool]:
    """Take the layout that an earlier start of a run chose, where it is left open again.

    A restart then goes on bit for bit.

    Args:
        plan: with its layout.
        asked: keys of [layout] that the user set, "strategy" among them.
        folder: of the run, whose plan.json is read (`kept_plan`).

    Returns:
        (plan with that layout and its `why`, True), its micro-batch and accumulation as they were,
        or (plan as it came, False) where there is no such choice, its stage is not the one asked
        for, or the plan's policies do not go with it.
    """
    kept = kept_plan(folder, plan.layout.processes) if is_open(asked) else None
    if kept is None or kept.layout.zero != asked.get("zero", kept.layout.zero):
        return plan, False
    again = replace(plan, layout=kept.layout, why=kept.why)
    return (again, True) if goes_together(again) else (plan, False)
