"""What the planner says of a divided model: where stages end, what waits on a rank, what is sent."""

from __future__ import annotations

from typing import Any

import pytest
from planned_case import case_of

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.comm_volume import CommVolume, StageTransfer, TensorExchange
from shoal.base.plans.placement import Placement
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.model_states import ParameterElements, predict_state_bytes
from shoal.forecast.memory.transient_memory import sum_rank_elements
from shoal.forecast.time.model_traffic import predict_busiest_traffic, predict_rank_traffic
from shoal.planning.pipeline_stages import deferred_weight_gradients, stage_units

LINK = Link("wire", 1e-6, 1e9)
CPU = Cluster(Device("cpu", 1e12, {}, 1e10, kind="cpu"), 1, 8, LINK, LINK)
MODEL = ModelFacts(
    "m",
    (
        UnitFacts("embedding", parameters=100),
        UnitFacts("blocks", 8, 100, 4, forward_flops=10.0, input_bytes=8.0, saved_split_bytes=64.0),
        UnitFacts("norm", parameters=2, plain_parameters=2, input_bytes=8.0),
        UnitFacts("loss", input_bytes=208.0, loss_bytes=96.0, tied_to="embedding"),
    ),
    1,
    4,
    902,
)


def case(layout: Layout, **rest: Any) -> PlanningCase:
    given: dict[str, Any] = {"batch": 8, "micro_batch": 1, "compute": "fp32", **rest}
    return case_of(MODEL, layout, CPU, **given)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zbv", 1), ("interleaved", 2)]
)
def test_stages_are_cut_by_cost(schedule: str, chunks: int) -> None:
    """An embedding costs as much as a block's parameters; the norm and the loss are no blocks."""
    asked = case(Layout(pp=4), schedule=schedule, chunks=chunks)
    found = [stage_units(asked, rank) for rank in range(4)]
    assert sum(sum(n for _, n in stage.blocks) for stage in found) == 8
    if schedule in ("1f1b", "gpipe"):
        counts = [sum(n for _, n in stage.blocks) for stage in found]
        assert max(counts[0], counts[3]) <= min(counts[1:3])
    assert [stage.tied for stage in found if stage.head] == [0.0 if schedule == "zbv" else 100.0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_copies_hold_every_stage_twice(ranks: int) -> None:
    """Rank i has the stages i and p − 1 − i, so states are twice those of one copy."""
    one = [stage_units(case(Layout(pp=ranks)), rank) for rank in range(ranks)]
    both = [stage_units(case(Layout(pp=ranks), schedule="dualpipe"), rank) for rank in range(ranks)]
    elements = [
        sum(sum(sum_rank_elements(case(Layout()), s.units, s.tied)) for s in at)
        for at in (one, both)
    ]
    assert elements[1] == 2 * elements[0] - 200, "embedding and head share their table"
    for rank, stage in enumerate(both):
        mirror = one[ranks - 1 - rank]
        assert sorted(stage.blocks) == sorted(one[rank].blocks + mirror.blocks)
        assert bool(stage.head) == (rank in (0, ranks - 1))
        assert stage.tied == 0, "the embedding is here too"


def test_other_frameworks_cut_equal_runs() -> None:
    asked = case(Layout(pp=4), framework="torchtitan")
    assert [sum(n for _, n in stage_units(asked, rank).blocks) for rank in range(4)] == [2, 2, 2, 2]


def test_what_has_no_narrow_copy_takes_16_bytes() -> None:
    found = predict_state_bytes(
        case(Layout(), compute="bf16"), ParameterElements(100.0, 0.0), wide=40.0
    )
    assert found == (2 * 60 + 4 * 40, 4 * 100, 12 * 60 + 8 * 40)


def test_a_put_off_loss_waits_with_every_micro_batch() -> None:
    """gpipe's last stage keeps gradients that the loss made in its forward pass."""
    kept = {
        schedule: predict_memory(case(Layout(pp=2), schedule=schedule), 1).parts["activations"]
        for schedule in ("gpipe", "1f1b")
    }
    gradients = 8 + 4 * 100  # of hidden states, of the head's weight
    blocks = sum(n for _, n in stage_units(case(Layout(pp=2)), 1).blocks)
    assert kept["gpipe"] - kept["1f1b"] == 7 * (64 * blocks + gradients)


def test_halves_of_a_backward_wait_on_later_ranks() -> None:
    assert [deferred_weight_gradients("zero-bubble", 4, 4, rank) for rank in range(4)] == [
        0,
        2,
        3,
        4,
    ]
    assert [
        deferred_weight_gradients(name, 4, 8, 3) for name in ("gpipe", "1f1b", "interleaved")
    ] == [0, 0, 0]


def test_fsdp_in_a_pipeline_gathers_per_micro_batch() -> None:
    ours = predict_state_bytes(
        case(Layout(pp=2, dp_shard=2, zero=3)), ParameterElements(100.0, 0.0)
    )
    others = predict_state_bytes(
        case(Layout(pp=2, dp_shard=2, zero=3), framework="torchtitan"),
        ParameterElements(100.0, 0.0),
    )
    assert (ours.gradients, others.gradients) == (200, 600)


TRAVEL = CommVolume(
    samples=2,
    exchanges=(
        (TensorExchange("all_gather", "forward", 64),),
        (TensorExchange("all_reduce", "forward", 32, 2),),
    ),
    crossings=(StageTransfer(40, 36),),
)


def row(name: str, elements: int, stages: tuple[int, ...], data: str, *axes: str) -> Placement:
    over = (*axes, *(("pp",) if len(stages) > 1 else ()))
    return Placement(name, (elements,), "float32", True, stages=stages, sum_over=over, data=data)


def placed(
    asked: PlanningCase, *over: str, both: bool = False, data: str = "whole"
) -> PlanningCase:
    """A table that both ends use, a weight and a norm on each of two stages."""
    ends = ((0, 1), (0, 1)) if both else ((0,), (1,))
    norms = (*over, *(("tp",) if asked.layout.tp > 1 else ()))
    rows = (
        row("table", 100, (0, 1), data, *over),
        row("first", 200, ends[0], data, *over),
        row("first norm", 4, ends[0], data, *norms),
        row("last", 150, ends[1], data, *over),
        row("last norm", 6, ends[1], data, *norms),
    )
    return asked.but(placements=rows)


def test_sent_bytes_add_up_over_axes() -> None:
    """Eight samples a step: four times what two samples make travel, and sums once."""
    asked = placed(case(Layout(tp=2, pp=2, schedule="1f1b")))
    first, last = (predict_rank_traffic(asked, TRAVEL, rank) for rank in range(2))
    assert (first.all_gather_bytes, first.send_bytes) == (4 * 32, 4 * 40)
    assert first.all_reduce_bytes == 16 + 400
    assert (last.all_reduce_bytes, last.send_bytes) == (4 * 2 * 32 + 24 + 400, 4 * 36)
    assert predict_busiest_traffic(asked, TRAVEL) == last


def test_two_copies_sum_all_gradients_and_share_the_micro_batches() -> None:
    """Each rank is once the first stage and once the last; both hold all of two stages."""
    asked = placed(case(Layout(pp=2, tp=2), schedule="dualpipe"), both=True)
    for rank in range(2):
        sent = predict_rank_traffic(asked, TRAVEL, rank)
        assert sent.send_bytes == 2 * 40 + 2 * 36
        assert sent.all_gather_bytes == 2 * 32
        norms = 16 + 24
        assert sent.all_reduce_bytes == 2 * 2 * 32 + norms + (800 + 600 + 400 + norms)


def test_split_optimizers_sum_their_part_of_what_is_shared() -> None:
    whole = case(Layout(pp=2, dp_replicate=2, schedule="1f1b"))
    parts = case(Layout(pp=2, dp_shard=2, zero=1, schedule="1f1b"))
    on_first = 4 * (100 + 200 + 4)
    sent = predict_rank_traffic(placed(whole, "dp_replicate"), TRAVEL, 0)
    assert sent.all_reduce_bytes == on_first + 400
    sent = predict_rank_traffic(placed(parts, "dp_shard", data="states"), TRAVEL, 0)
    assert sent.all_reduce_bytes == 200
    assert sent.reduce_scatter_bytes == sent.all_gather_bytes == on_first / 2
