"""What a divided model makes travel, stage by stage, and how many bytes a rank so sends per step.

`Travel` is stated when a model is divided: every collective over the tensor-parallel ranks, every
tensor that crosses from stage to stage, and the gradients that are summed beyond the data ranks.
A run's counters then say the same, to the byte.

    sent = data (step_traffic) + tp (tensor_traffic) + pp (pipe_traffic) + Σ 2(k−1)/k · G

G bytes of gradients of the parameters that k ranks of the pipeline hold: tied ones, and all where
the schedule holds two copies of the model, each of which sees its part of the micro-batches.
Source: `traffic`.
"""

from __future__ import annotations

from shoal.base.actions import Schedule
from shoal.base.comm_volume import Travel
from shoal.base.estimate import Case
from shoal.planner.model_states import WIDTHS, shard_counts
from shoal.planner.schedules import make_schedule
from shoal.planner.stage_cut import Stage, cut, root_share
from shoal.planner.traffic import Payload, StepTraffic, pipe_traffic, step_traffic, tensor_traffic
from shoal.planner.transient_memory import rank_sum, wide_elements


def sent_by(case: Case, travel: Travel, rank: int) -> StepTraffic:
    """Bytes that a rank of pipeline rank `rank` sends in one step of the case, by kind.

    Errors   PlanError for a schedule that cannot run so many micro-batches
    """
    layout, schedule = case.layout, _schedule(case)
    pieces = schedule.pieces
    passes = case.batch / (layout.data_degree * travel.samples * schedule.copies)
    again = case.plan.recompute == "full"
    own = 1 / shard_counts(case)[0]  # what is summed beyond the data ranks is a rank's part of it
    sent = StepTraffic()
    for first in range(0, schedule.stages, pieces):
        places = schedule.stage_rank[first : first + pieces]
        sent += pipe_traffic(travel.crossings, places, rank, micro_batches=1).times(passes)
    for stage in (s % pieces for s, holder in enumerate(schedule.stage_rank) if holder == rank):
        sums = round(travel.partial_bytes[stage] * own)
        each = travel.exchanges[stage]
        sent += tensor_traffic(each, layout.tp, micro_batches=1, recomputed=again).times(passes)
        sent += tensor_traffic((), layout.tp, micro_batches=0, partial_bytes=sums)
    for kept in travel.kept:
        holders = {at for s, at in enumerate(schedule.stage_rank) if s % pieces in kept.stages}
        if rank in holders:
            share = 2 * (len(holders) - 1) / len(holders)
            sent += StepTraffic(all_reduce_bytes=share * own * kept.gradient_bytes)
    return sent + data_traffic(case, cut(case, rank))


def _schedule(case: Case) -> Schedule:
    """The case's pipeline; without one, a rank that holds the only stage."""
    if case.layout.pp == 1:
        return Schedule("", ((),), (0,), case.accumulate)
    return make_schedule(case.schedule, case.layout.pp, case.accumulate, case.layout.chunks)


def data_traffic(case: Case, stage: Stage) -> StepTraffic:
    """Bytes for gradients and weights over the data-parallel axes, of the rank's own part."""
    elements = sum(rank_sum(case, stage.units, stage.tied))
    inside = sum(n * (1 - root_share(u)) * sum(rank_sum(case, [(u, 1)])) for u, n in stage.units)
    width = WIDTHS[case.plan.compute]
    wide = max(4, width)
    kept_wide = wide_elements(case, stage)
    payload = Payload(
        gradient_bytes=round((case.reduce_bytes or wide) * elements),
        weight_bytes=round(width * (elements - kept_wide) + wide * kept_wide),
        unit_bytes=round(width * inside),
        root_bytes=round(width * (elements - inside)),
    )
    return step_traffic(
        case.layout, payload, accumulate=case.accumulate, defer_sync=case.plan.defer_sync
    )


def busiest(case: Case, travel: Travel) -> StepTraffic:
    """What the rank sends that sends most."""
    return max(
        (sent_by(case, travel, rank) for rank in range(case.layout.pp)),
        key=lambda sent: sent.total_bytes,
    )
