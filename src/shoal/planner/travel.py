"""What a divided model makes travel, stage by stage, and how many bytes a rank so sends per step.

`Travel` is stated when a model is divided: every collective over the tensor-parallel ranks, every
tensor that crosses from stage to stage, and the gradients that are summed beyond the data ranks.
A run's counters then say the same, to the byte.

    sent = data (step_traffic) + tp (tensor_traffic) + pp (pipe_traffic) + 2(k−1)/k · ties

k ranks hold a tied weight. Source: `traffic`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.estimate import Case
from shoal.planner.schedules import make_schedule
from shoal.planner.stage_cut import Stage, cut, repeated
from shoal.planner.states import WIDTHS, shard_counts
from shoal.planner.traffic import (
    Crossing,
    Payload,
    StepTraffic,
    TensorExchange,
    pipe_traffic,
    step_traffic,
    tensor_traffic,
)
from shoal.planner.transients import rank_sum, wide_elements


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold: which, and bytes of its gradient on one rank."""

    stages: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True)
class Travel:
    """What one micro-batch of `samples` samples makes travel in a divided model.

    exchanges      of each stage: collectives over its tensor-parallel ranks
    partial_bytes  of each stage: gradients of whole parameters, summed over those once a step
    crossings      between each stage and the next, on one tensor-parallel rank
    ties           parameters of several stages, whose gradients are summed once a step
    """

    samples: int
    exchanges: tuple[tuple[TensorExchange, ...], ...]
    partial_bytes: tuple[int, ...]
    crossings: tuple[Crossing, ...] = ()
    ties: tuple[Tie, ...] = ()


def sent_by(case: Case, travel: Travel, rank: int) -> StepTraffic:
    """Bytes that a rank of pipeline rank `rank` sends in one step of the case, by kind.

    Errors   PlanError for a schedule that cannot run so many micro-batches
    """
    layout = case.layout
    stage_rank: tuple[int, ...] = (0,)
    if layout.pp > 1:
        chunks = case.chunks if case.schedule == "interleaved" else 1
        made = make_schedule(case.schedule, layout.pp, case.accumulate, chunks)
        stage_rank = made.stage_rank
    passes = case.batch / (layout.data_degree * travel.samples)
    again = case.recompute == "full"
    own = 1 / shard_counts(case)[0]  # what is summed beyond the data ranks is a rank's part of it
    sent = pipe_traffic(travel.crossings, stage_rank, rank, micro_batches=1).times(passes)
    for stage, holder in enumerate(stage_rank):
        if holder != rank:
            continue
        sums = round(travel.partial_bytes[stage] * own)
        each = travel.exchanges[stage]
        sent += tensor_traffic(each, layout.tp, micro_batches=1, recomputed=again).times(passes)
        sent += tensor_traffic((), layout.tp, micro_batches=0, partial_bytes=sums)
    for tie in travel.ties:
        holders = {stage_rank[stage] for stage in tie.stages}
        if rank in holders:
            share = 2 * (len(holders) - 1) / len(holders)
            sent += StepTraffic(all_reduce_bytes=share * own * tie.gradient_bytes)
    return sent + data_traffic(case, cut(case, rank))


def data_traffic(case: Case, stage: Stage) -> StepTraffic:
    """Bytes for gradients and weights over the data-parallel axes, of the rank's own part."""
    elements = sum(rank_sum(case, stage.units, stage.tied))
    blocks = repeated(case.model)
    inside = sum(rank_sum(case, [(u, n) for u, n in stage.units if u in blocks]))
    width = WIDTHS[case.compute]
    wide = max(4, width)
    kept_wide = wide_elements(case, stage)
    payload = Payload(
        gradient_bytes=round((case.reduce_bytes or wide) * elements),
        weight_bytes=round(width * (elements - kept_wide) + wide * kept_wide),
        unit_bytes=round(width * inside),
        root_bytes=round(width * (elements - inside)),
    )
    return step_traffic(
        case.layout, payload, accumulate=case.accumulate, defer_sync=case.defer_sync
    )


def busiest(case: Case, travel: Travel) -> StepTraffic:
    """What the rank sends that sends most."""
    return max(
        (sent_by(case, travel, rank) for rank in range(case.layout.pp)),
        key=lambda sent: sent.total_bytes,
    )
