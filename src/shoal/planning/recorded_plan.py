"""Recorded plan: the layout that an earlier start of a run chose, which a restart uses again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.damaged_lines import read_object
from shoal.planning.settle import is_layout_open, policies_compatible


def read_recorded_plan(folder: Path, processes: int) -> Plan | None:
    """Read the plan that an earlier start of a run chose for the same number of processes.

    Return None if plan.json is missing or damaged, has other processes, or if the user fixed its
    layout.

    Args:
        folder: of the run.

    Note:
        <run>/plan.json holds a plan (`Plan.to_json`) and the key `chosen`: the user left the layout
        open, and the planner chose this one.
    """
    told = read_object(folder / "plan.json")
    try:
        plan = Plan.from_json(json.dumps(told))
        return plan if told["chosen"] and plan.layout.processes == processes else None
    except (ShoalError, ValueError, KeyError, TypeError):
        return None


def restore_choice(plan: Plan, asked: Mapping[str, Any], folder: Path) -> tuple[Plan, bool]:
    """Use the layout that an earlier start of a run chose, if the user leaves it open again.

    The restarted run then continues bit for bit.

    Args:
        plan: with its layout.
        asked: keys of [layout] that the user set, "strategy" among them.
        folder: of the run, whose plan.json is read (`read_recorded_plan`).

    Returns:
        (plan with that layout, its `why`, micro-batch and accumulation; True). (`plan` unchanged,
        False) without a recorded choice, if the user asks for another ZeRO stage, or if the plan's
        policies do not fit that layout.
    """
    kept = read_recorded_plan(folder, plan.layout.processes) if is_layout_open(asked) else None
    if kept is None or kept.layout.zero != asked.get("zero", kept.layout.zero):
        return plan, False
    again = replace(plan, layout=kept.layout, why=kept.why)
    return (again, True) if policies_compatible(again) else (plan, False)
