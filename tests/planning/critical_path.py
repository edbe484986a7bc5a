"""The critical path of a pipeline: what no order of its actions can beat.

A rank cannot start before the stages ahead of it have passed one micro-batch; it must do all its
forwards and input gradients before its last one leaves; that one must pass back to the first stage:

    makespan ≥ Σ F of the stages ahead + m(F + B) + Σ B of the stages ahead + W  (B + W if not cut)
    makespan ≥ Σ F of the stages ahead + m(F + B + W)
    makespan ≥ one micro-batch through every stage and back
    bubble   ≥ the first of these on the rank of stage 0 − m(F + B + W), where one rank feeds all

Derived from the definition of the actions (base/plans/pipeline_actions.py); tests hold every schedule above it.
"""

from __future__ import annotations

from shoal.base.plans.pipeline_actions import PipelineSchedule


def critical_path_s(
    schedule: PipelineSchedule, forward_s: float = 1.0, input_s: float = 1.0, weight_s: float = 1.0
) -> tuple[float, float]:
    """Least (makespan, bubble) of any order of these actions on these ranks, seconds.

    forward_s, input_s, weight_s  of one rank and micro-batch, all its chunks together

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> critical_path_s(make_schedule("gpipe", 4, 8))
    (33.0, 9.0)
    """
    ranks, pieces = len(schedule.ranks), schedule.stages_per_copy
    share, m = ranks / pieces, schedule.micro_batches
    cut = any(act.kind == "I" for acts in schedule.ranks for act in acts)
    back = input_s if cut else input_s + weight_s
    late = weight_s * share if cut else 0.0
    least = pieces * share * (forward_s + back) + late
    for rank in range(ranks):
        depth = min(s % pieces for s, at in enumerate(schedule.stage_rank) if at == rank)
        head, tail = depth * share * forward_s, depth * share * back
        least = max(least, head + m * (forward_s + input_s + weight_s))
        least = max(least, head + m * (forward_s + back) + tail + late)
    fed = [r for s, r in enumerate(schedule.stage_rank) if s % pieces == 0]
    work = m * (forward_s + input_s + weight_s)
    if len(fed) > 1:
        return least, 0.0
    back_at_first = max(
        (schedule.stage_rank.index(rank) * share * (forward_s + back)) + m * (forward_s + back)
        for rank in range(ranks)
    )
    return least, max(0.0, back_at_first + late - work)
