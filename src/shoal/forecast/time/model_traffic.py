"""Bytes that a rank of a parallelized model sends per step: tp, pp, gradients and weights.

`parallelize` states `CommVolume`: every collective over the tensor-parallel ranks, and every tensor
that crosses pipeline stages. Sums of gradients and gathers of weights follow from the placements
(`placed`). A run's counters agree with these figures to the byte.

    sent = tp (tensor_traffic) + pp (pipe_traffic) + gradient_sums + weight_gathers
"""

from __future__ import annotations

from shoal.base.estimates.estimate import PlanningCase
from shoal.base.plans.comm_volume import CommVolume
from shoal.base.plans.pipeline_actions import PipelineSchedule
from shoal.forecast.memory.placed_bytes import gradient_sums, weight_gathers
from shoal.forecast.time.step_traffic import (
    StepTraffic,
    collective_traffic,
    pipe_traffic,
    tensor_traffic,
)
from shoal.planning.pipeline_schedules import make_schedule


def predict_rank_traffic(case: PlanningCase, travel: CommVolume, rank: int) -> StepTraffic:
    """Predict the bytes that the first rank of a pipeline rank sends in one step, by kind.

    Args:
        case: with a plan that has its placements.
        travel: tp and pp messages of one micro-batch.
        rank: pipeline rank.

    Raises:
        PlanError: the schedule cannot run so many micro-batches.
    """
    layout, schedule = case.layout, _case_schedule(case)
    pieces = schedule.stages_per_copy
    passes = case.batch / (layout.data_degree * travel.samples * schedule.copies)
    again = case.plan.recompute == "full"
    sent = StepTraffic()
    for first in range(0, schedule.stages, pieces):
        places = schedule.stage_rank[first : first + pieces]
        sent += pipe_traffic(travel.crossings, places, rank, micro_batches=1).times(passes)
    for stage in (s % pieces for s, holder in enumerate(schedule.stage_rank) if holder == rank):
        each = travel.exchanges[stage]
        sent += tensor_traffic(each, layout.tp, micro_batches=1, recomputed=again).times(passes)
    first = rank * (layout.processes // layout.pp)
    gathers = weight_gathers(case.plan, first, case.cluster.per_node)
    for one in (*gradient_sums(case.plan, first), *gathers):
        sent += collective_traffic(*one)
    return sent


def _case_schedule(case: PlanningCase) -> PipelineSchedule:
    """Return the case's pipeline schedule; without one, that of a rank with the only stage."""
    if case.layout.pp == 1:
        return PipelineSchedule("", ((),), (0,), case.accumulate)
    return make_schedule(case.schedule, case.layout.pp, case.accumulate, case.layout.chunks)


def predict_busiest_traffic(case: PlanningCase, travel: CommVolume) -> StepTraffic:
    """Predict the bytes that the busiest rank sends in one step, by kind of collective.

    Args:
        case: with a plan that has its placements; without them sums and gathers count as 0.
        travel: tp and pp messages of one micro-batch, as recorded when the model was parallelized.

    Raises:
        PlanError: the schedule cannot run so many micro-batches.

    Note:
        Of the ranks with the same pipeline stages only the first is compared.
    """
    return max(
        (predict_rank_traffic(case, travel, rank) for rank in range(case.layout.pp)),
        key=lambda sent: sent.total_bytes,
    )
