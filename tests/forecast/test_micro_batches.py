"""The default micro-batch: a rank's share, what a pipeline needs, and what fits in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.layout_search import fastest_micro_batch, judge_candidate
from shoal.forecast.time.step_time import predict_time
from shoal.planning.micro_batch_sizes import (
    default_micro_batch,
    micro_batch_sizes,
    with_micro_batch,
)
from shoal.planning.pipeline_schedules import can_run


@pytest.mark.parametrize(
    ("layout", "batch", "size"),
    [
        (Layout(), 16, 16),
        (Layout(dp_replicate=2), 16, 8),
        (Layout(dp_shard=3, zero=3), 24, 8),
        (Layout(tp=2, dp_replicate=2), 24, 12),
        (Layout(cp=2), 5, 5),
        (Layout(threads=2), 16, 8),
        (Layout(pp=2, schedule="1f1b"), 16, 4),
        (Layout(pp=4, schedule="interleaved", chunks=2), 24, 3),
        (Layout(pp=2, schedule="dualpipe", chunks=2), 24, 6),
        (Layout(pp=4, schedule="1f1b"), 3, 1),
    ],
    ids=str,
)
def test_what_a_layout_has_by_default(layout: Layout, batch: int, size: int) -> None:
    assert default_micro_batch(layout, batch) == size
    share = batch // layout.data_degree
    assert layout.pp == 1 or can_run(layout, share // size)


def test_a_choice_is_kept_where_it_divides_and_else_the_next_below_it() -> None:
    size, seen = 0, []
    for degree in (1, 2, 3, 4, 1):
        size = default_micro_batch(Layout(dp_replicate=degree), 24, at_most=size)
        seen.append(size)
    assert seen == [24, 12, 8, 6, 6]


def cases(memory_bytes: float) -> PlanningCase:
    """A Llama on two devices of so much memory each, batch 32."""
    cluster = parse_machines("2xH100-80GB")
    device = replace(cluster.device, memory_bytes=memory_bytes)
    shape = own_shape(
        "llama", {"dim": 512, "layers": 8, "heads": 8}, vocabulary=32000, sequence=1024
    )
    plan = Plan(Layout(dp_replicate=2), 32, 16, accumulate=1, compute="bf16")
    return PlanningCase(transformer_facts(shape, 1024, 2), replace(cluster, device=device), plan)


def test_memory_bounds_it_and_an_eighth_is_always_tried() -> None:
    large = fastest_micro_batch(cases(80e9), measured=False)
    assert large == 16, "the whole share"
    sizes = []
    for memory_bytes in (8e9, 6e9, 5e9, 4e9):
        case = cases(memory_bytes)
        size = fastest_micro_batch(case, measured=False)
        sizes.append(size)
        assert size in micro_batch_sizes(case.layout, case.batch)
        fits = {n for n in micro_batch_sizes(case.layout, 32) if _fits(case, n)}
        assert size == max(fits)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) >= 3, "memory bounds it somewhere in between"
    assert fastest_micro_batch(cases(1e8), measured=False) == 4, "as before, where nothing fits"


def _fits(case: PlanningCase, size: int) -> bool:
    tried = replace(case, plan=with_micro_batch(case.plan, size))
    return judge_candidate(tried, predict_run(tried)).after == "fits"


def test_the_largest_is_taken_unless_another_is_much_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By more than forecasts err, and on a GPU; and the times that are foreseen are looked at."""
    case = cases(80e9)
    foreseen_s = {16: 1.0, 8: 0.9, 4: 0.95, 2: 1.0, 1: 1.2}
    monkeypatch.setattr(
        "shoal.forecast.search.layout_search.predict_time",
        lambda one: replace(predict_time(one), step_s=foreseen_s[one.micro_batch]),
    )
    assert fastest_micro_batch(case, measured=True) == 16
    foreseen_s[8] = 0.6
    assert fastest_micro_batch(case, measured=True) == 8
    assert fastest_micro_batch(case, measured=False) == 16
    cores = replace(case.cluster, device=replace(case.cluster.device, kind="cpu"))
    assert fastest_micro_batch(replace(case, cluster=cores), measured=True) == 16
    pipe = replace(case, plan=replace(case.plan, layout=Layout(pp=2, schedule="1f1b")))
    foreseen_s.update({32: 0.9, 8: 1.0})
    assert fastest_micro_batch(pipe, measured=True) == 8, "two passes for each stage"
