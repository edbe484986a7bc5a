"""Times of a pipeline's actions: a schedule executed with given seconds of each action.

The page draws them (sections/pipeline_timeline.py); the verdict asks how long a step is if a stage
had other times (verdict/stage_costs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.planning.schedule_checks import input_of


@dataclass(frozen=True)
class TimedAction:
    """One action of a pipeline's rank with its start and end, in seconds or units.

    Attributes:
        wait_s: seconds that it waited for its inputs before its start.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float
    wait_s: float = 0.0


def time_schedule(
    schedule: PipelineSchedule, costs: Callable[[int, str], float]
) -> list[TimedAction]:
    """Return the actions of a schedule with their times, each started as early as it can.

    Args:
        schedule: of the step.
        costs: (rank, kind) → time of a micro-batch on all stages of the rank.

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> timed = time_schedule(make_schedule("1f1b", 2, 2), lambda rank, kind: 1.0)
    >>> max(one.end_s for one in timed)
    6.0
    """
    share = len(schedule.ranks) / schedule.stages_per_copy
    made: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * len(schedule.ranks), [0] * len(schedule.ranks)
    found: list[TimedAction] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                need = input_of(schedule, action)
                if need is not None and need not in made:
                    break
                start_s = max(clocks[rank], made[need] if need is not None else 0.0)
                end_s = start_s + costs(rank, action.kind) * share
                found.append(TimedAction(rank, action, start_s, end_s))
                if action.kind != "W":
                    kind = "F" if action.kind == "F" else "B"
                    made[kind, action.stage, action.micro_batch] = end_s
                clocks[rank], places[rank], moved = end_s, places[rank] + 1, True
    return found
