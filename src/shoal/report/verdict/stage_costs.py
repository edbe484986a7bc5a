"""Cost of a pipeline stage whose passes take longer than those of the others.

What a stage costs depends on the schedule: the first stage's work hides behind its wait for the
first backward, a middle stage's does not. So the run's schedule is executed twice: with the
measured seconds of each stage's passes, and with those of the cure (schedule_times.py). The
difference is taken off the measured step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.base.errors import PlanError
from shoal.base.text.units import seconds_text
from shoal.planning.pipeline_schedules import make_schedule
from shoal.report.order_statistics import median
from shoal.report.schedule_times import time_schedule
from shoal.report.verdict.run_facts import RunFacts
from shoal.report.verdict.step_costs import StepCost
from shoal.report.verdict.step_replay import StepReplay
from shoal.report.verdict.step_seconds import BACKWARD, PASSES

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST_SHARE = 0.08
"""Share of a step from which a stage is reported: blocks of equal work differ a little."""
MORE_WORK = 1.2
"""Elements of a stage's matrices, in those of the others, from which the cut explains its time."""
MOST_ACTIONS = 65_536
"""Micro-batches of all stages above which no schedule is executed."""
FORWARD, BACK = 0, 1


def list_stage_costs(replay: StepReplay, facts: RunFacts) -> Iterator[StepCost]:
    """Yield the cost of the pipeline stage whose passes take longest.

    If the plan gave the stage more work, a better cut gives every stage the mean. Else its own code
    or its machine is slow, and its passes would take as long as those of the others.
    """
    import numpy as np

    stages = facts.stages
    if stages < 2 or replay.ranks != tuple(range(len(replay.ranks))) or len(replay.ranks) % stages:
        return
    passes_s = replay.own_s[:, :, [PASSES, BACKWARD]]
    by_step_s = passes_s.reshape(len(passes_s), stages, -1, 2).mean(axis=2)
    by_stage_s = np.array(  # [stages, passes]
        [[replay.mean_s(by_step_s[:, stage, kind]) for kind in (FORWARD, BACK)]
         for stage in range(stages)]
    )  # fmt: skip
    means_s = by_stage_s.sum(axis=1)
    late = int(means_s.argmax())
    others = np.arange(stages) != late
    usual_s = median(by_stage_s[others], axis=0)
    work = facts.stage_work or (1.0,) * stages
    by_plan = work[late] > MORE_WORK * max(1.0, float(np.mean(np.array(work)[others])))
    cured_s = by_stage_s.copy()
    if by_plan:
        cured_s[:] = by_stage_s.mean(axis=0)
    else:
        cured_s[late] = np.minimum(by_stage_s[late], usual_s)
    gain_s = _step_seconds(facts, by_stage_s) - _step_seconds(facts, cured_s)
    excess_s = by_stage_s[late] - usual_s
    large = [kind for kind in (FORWARD, BACK) if excess_s[kind] > 0.25 * excess_s.sum()]
    names = " and ".join(("forward", "backward")[kind] for kind in large) or "passes"
    command = "shoal doctor on its host; its blocks' own code"
    yield StepCost(
        "late_stage",
        f"stage {late}'s {names} pass{'es' * (len(large) != 1)}",
        np.maximum(replay.step_s - max(0.0, gain_s), 0.0),
        (
            f"stage {late}: {seconds_text(means_s[late])} a step in its passes; "
            f"the others: {seconds_text(float(usual_s.sum()))}.",
            "Its share of the layers is larger." if by_plan else
            "Its share of the layers is as large.",
        ),
        "layout.pp with another cut: fewer layers in that stage" if by_plan else command,
        LEAST_SHARE,
    )  # fmt: skip


def _step_seconds(facts: RunFacts, by_stage_s: Array) -> float:
    """Return how long a step's passes take by its schedule, given those of each stage."""
    stages, count = len(by_stage_s), facts.accumulate
    if stages * count * facts.chunks > MOST_ACTIONS:
        return float(by_stage_s.sum(axis=1).max())
    try:
        schedule = make_schedule(facts.schedule, stages, count, facts.chunks)
    except PlanError:  # a damaged plan
        return float(by_stage_s.sum(axis=1).max())
    forward_s, back_s = by_stage_s[:, FORWARD] / count, by_stage_s[:, BACK] / count
    if not back_s.any():  # one number for both passes: a backward takes two thirds
        forward_s, back_s = forward_s / 3, forward_s * 2 / 3
    each_s = {"F": forward_s, "B": back_s, "I": back_s / 2, "W": back_s / 2}
    timed = time_schedule(schedule, lambda rank, kind: float(each_s[kind][rank]))
    return max(one.end_s for one in timed)
