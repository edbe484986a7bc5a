"""Predicted peak memory: states per layout, what is in flight, which instant wins, verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_case import case_of

import shoal
from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import MemoryEstimate, ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_fit import judge_memory
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.framework_memory import own_kernels
from shoal.forecast.memory.model_states import ParameterElements, predict_state_bytes, shard_counts
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.machine.states import count_state_bytes as held_bytes
from shoal.machine.states import measure_peak_bytes
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.planning.pipeline_bubble import micro_batches_in_flight
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.pipeline_stages import block_count, stage_units
from shoal.planning.schedule_checks import check_schedule

LINK = Link("wire", 1e-6, 1e11)
GPUS = Cluster(Device("gpu", 80e9, {}, 2e12), 16, 8, LINK, LINK)
CPU = Cluster(Device("cpu", 16e9, {}, 1e10, kind="cpu"), 1, 1, LINK, LINK)


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    return transformer_facts(published_shape("llama-3-8b"), 8192, 2)


def case(model: ModelFacts, layout: Layout, **rest: Any) -> PlanningCase:
    given: dict[str, Any] = {"batch": 128, "micro_batch": 1, **rest}
    return case_of(model, layout, GPUS, **given)


def peak(found: PlanningCase, stage: int | None = None) -> MemoryEstimate:
    return predict_memory(found, stage)


@pytest.mark.parametrize(
    ("zero", "compute", "bytes_per_element"),
    [
        (0, "fp32", 16.0),
        (1, "fp32", 8 + 8 / 8),
        (2, "fp32", 4 + 12 / 8),
        (3, "fp32", 16 / 8),
        (0, "bf16", 18.0),
        (1, "bf16", 6 + 12 / 8),
        (2, "bf16", 2 + 16 / 8),
        (3, "bf16", 16 / 8),
        (0, "fp64", 32.0),
    ],
)
def test_states_per_element(
    llama: ModelFacts, zero: int, compute: str, bytes_per_element: float
) -> None:
    layout = Layout(dp_shard=8, zero=zero) if zero else Layout(dp_replicate=8)
    states = predict_state_bytes(
        case(llama, layout, compute=compute), ParameterElements(1000.0, 0.0)
    )
    assert sum(states) == pytest.approx(1000 * bytes_per_element)


def test_average_defer_sync_and_offload_change_states(llama: ModelFacts) -> None:
    one = ParameterElements(1000.0, 0.0)

    def total(zero: int, **rest: Any) -> float:
        return sum(predict_state_bytes(case(llama, Layout(dp_shard=8, zero=zero), **rest), one))

    assert total(1, average=0.9) - total(1) == 4000 / 8
    assert total(2, defer_sync=True) - total(2) == 4000 * 7 / 8
    assert total(3, defer_sync=True) - total(3) == 4000
    assert total(3, defer_sync=True, batch=8) == total(3, batch=8)  # one micro-batch: nothing waits
    assert total(1) - total(1, offload="optimizer") == 8000 / 8  # masters stay
    assert total(3, offload="parameters") == 0


def test_experts_are_split_over_the_ranks_that_share_them(llama: ModelFacts) -> None:
    layout = Layout(pp=4, dp_shard=16, tp=2, zero=1)
    assert shard_counts(case(llama, layout, ep=4, expert_tp=2)) == (16, 4.0)
    assert shard_counts(case(llama, layout, ep=4, expert_tp=1)) == (16, 8.0)
    assert shard_counts(case(llama, replace(layout, dp_shard=4, cp=4), ep=4, expert_tp=2)) == (
        16,
        4.0,
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero-bubble", 1),
        ("zbv", 2),
        ("dualpipe", 2),
    ],
)
def test_in_flight_is_what_the_schedules_keep(name: str, chunks: int, ranks: int) -> None:
    for micro_batches in (ranks, 2 * ranks, 4 * ranks):
        if name in ("zbv", "dualpipe") and micro_batches < 2 * ranks:
            continue
        counted = check_schedule(make_schedule(name, ranks, micro_batches, chunks)).in_flight
        formula = [
            micro_batches_in_flight(name, ranks, micro_batches, rank, chunks)
            for rank in range(ranks)
        ]
        assert formula == list(counted), (name, ranks, micro_batches)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_stages_hold_every_unit(llama: ModelFacts, schedule: str, ranks: int) -> None:
    asked = case(llama, Layout(pp=ranks), schedule=schedule)
    found = [stage_units(asked, rank) for rank in range(ranks)]
    copies = 2 if schedule == "dualpipe" else 1
    blocks = [sum(count for _, count in stage.blocks) for stage in found]
    assert sum(blocks) == copies * block_count(llama) == copies * 32
    others = [
        stage_units(replace(asked, framework="torchtitan"), rank).blocks for rank in range(ranks)
    ]
    equal = [sum(count for _, count in held) for held in others]
    assert max(equal) - min(equal) <= copies
    assert blocks[0] <= max(blocks), "the rank with the embedding has no more than others"
    heads = [stage for stage in found if stage.head is not None]
    assert len(heads) == copies
    names = [unit.name for stage in found for unit, _ in stage.units]
    assert names.count("embedding") == names.count("head") == copies


def test_a_tied_head_on_another_stage_holds_a_copy_of_the_table() -> None:
    model = transformer_facts(published_shape("gpt-3-6.7b"), 2048, 2)
    last = stage_units(case(model, Layout(pp=4)), 3)
    assert last.tied == 50257 * 4096
    assert stage_units(case(model, Layout()), 0).tied == 0


def test_more_stages_than_blocks_is_refused(llama: ModelFacts) -> None:
    with pytest.raises(PlanError, match=r"try: layout\.pp=32"):
        peak(case(llama, Layout(pp=33)))


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("recompute", "ful", "full"),
        ("loss", "chunk", "chunked"),
        ("compute", "bf61", "bf16"),
        ("offload", "optimiser", "optimizer"),
        ("framework", "megatrom", "megatron"),
    ],
)
def test_unknown_policies_name_the_nearest(
    llama: ModelFacts, key: str, value: str, hint: str
) -> None:
    with pytest.raises(PlanError, match=f"try: {hint}"):
        peak(case(llama, Layout(), **{key: value}))


def test_recompute_trades_activations_for_work(llama: ModelFacts) -> None:
    layout = Layout(dp_shard=64, zero=3)
    sizes = [
        peak(case(llama, layout, recompute=policy)).parts["activations"]
        for policy in ("none", "selective", "full")
    ]
    assert sizes[0] > 1.5 * sizes[1] > 3 * sizes[2]


def test_the_loss_fills_the_peak_until_it_is_chunked(llama: ModelFacts) -> None:
    layout = Layout(dp_shard=64, zero=3)
    full = peak(case(llama, layout, recompute="full", loss="full"))
    assert full.when == "loss"
    assert full.parts["loss"] == 12 * 8192 * 128256
    chunked = peak(case(llama, layout, recompute="full", loss="chunked"))
    assert full.peak_bytes - chunked.peak_bytes > 5e9
    split = peak(case(llama, Layout(dp_shard=8, tp=8, zero=3), loss="parallel"))
    assert split.parts["loss"] == 16 * 8192 * 128256 / 8  # DTensor's makes two copies more


def test_sequence_parallelism_splits_what_tensor_parallelism_does_not(llama: ModelFacts) -> None:
    layout = Layout(dp_shard=8, tp=8, zero=1)

    def kept(framework: str, split: bool) -> float:
        said = "on" if split else "off"
        found = case(llama, layout, framework=framework, sequence_parallel=said)
        return peak(found).parts["activations"]

    # 8 + 33/8 units of 41 without, 41/8 with; DTensor keeps both gathered inputs, 4 units, whole
    assert kept("megatron", False) / kept("megatron", True) == pytest.approx(12.1 / 5.1, rel=0.05)
    assert kept("shoal", False) / kept("shoal", True) == pytest.approx(12.1 / 8.6, rel=0.05)


def test_the_first_stage_of_1f1b_and_the_last_of_few_micro_batches_are_fullest(
    llama: ModelFacts,
) -> None:
    assert peak(case(llama, Layout(pp=4, dp_shard=8, zero=1))).stage == 0
    # one micro-batch in flight everywhere: the head decides
    assert peak(case(llama, Layout(pp=4), batch=1, loss="full")).stage == 3


def test_a_pipeline_over_fsdp_keeps_whole_weights_and_gradients(llama: ModelFacts) -> None:
    """As torchtitan runs it; Shoal gathers and sends with every micro-batch."""
    asked = case(llama, Layout(pp=4, dp_shard=8, zero=3), framework="torchtitan")
    found = peak(asked, 1)
    elements = 8 * llama.units[1].parameters
    assert found.parts["gathered"] == 2 * elements
    assert found.parts["gradients"] == pytest.approx(4 * elements * (1 + 1 / 8))


def test_uneven_experts_fill_the_fullest_rank_more() -> None:
    model = transformer_facts(published_shape("mixtral-8x7b"), 4096, 2)
    one = peak(case(model, Layout(dp_shard=8, zero=1), ep=1)).parts["activations"]
    eight = peak(case(model, Layout(dp_shard=8, zero=1), ep=8)).parts["activations"]
    assert 1.1 < eight / one < 1.25


def test_parts_sum_to_the_peak_and_the_interval_holds_it(llama: ModelFacts) -> None:
    found = peak(case(llama, Layout(dp_shard=8, zero=3), loss="full"))
    assert sum(found.parts.values()) == pytest.approx(found.peak_bytes)
    outside = found.parts["allocator"] + found.parts.get("context", 0.0)
    assert found.allocated_bytes == pytest.approx(found.peak_bytes - outside)
    assert found.low_bytes < found.peak_bytes < found.high_bytes


def test_context_is_added_outside_the_allocator(llama: ModelFacts) -> None:
    reserved = replace(GPUS, device=replace(GPUS.device, reserved_bytes=2e9))
    found = case(llama, Layout(dp_shard=8, zero=3))
    more = predict_memory(replace(found, cluster=reserved))
    assert more.peak_bytes - peak(found).peak_bytes == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("recompute", "compute"),
    [("none", "fp32"), ("selective", "fp32"), ("none", "bf16"), ("full", "bf16")],
)
def test_a_real_step_holds_what_is_predicted(recompute: str, compute: str) -> None:
    """Our Llama on this CPU: states and everything beside them, within 5 % of the peak."""
    arguments = {"dim": 256, "layers": 4, "heads": 4, "vocabulary": 512, "sequence": 128}
    run = shoal.parallelize(
        build("llama", arguments),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        token_loss,
        layout="single",
        precision=compute,
        recompute=recompute,
        micro_batch=4,
        batch=4,
    )
    tokens = torch.randint(0, 512, (4, 128))
    run.step((tokens, tokens))
    held = held_bytes(run)
    extra = measure_peak_bytes(lambda: run.step((tokens, tokens)), torch.device("cpu"), times=1)
    run.close()
    width = 4 if compute == "fp32" else 2
    facts = transformer_facts(
        own_shape("llama", arguments), 128, width, own_kernels("cpu", 128, width)
    )
    found = predict_memory(
        case_of(facts, Layout(), CPU, 4, 4, compute=compute, recompute=recompute)
    )
    states = found.parts["weights"] + found.parts["optimizer"]
    assert states == pytest.approx(held.weights + held.optimizer, rel=0.02)
    assert found.allocated_bytes == pytest.approx(held.total + extra, rel=0.05)


def test_verdicts_say_fits_tight_and_no_with_what_is_left(llama: ModelFacts) -> None:
    found = peak(case(llama, Layout(dp_shard=8, zero=3), recompute="full", loss="full"))
    fits = judge_memory(found, found.high_bytes * 1.001)
    tight = judge_memory(found, found.peak_bytes)
    no = judge_memory(found, found.low_bytes * 0.999)
    assert [fits.word, tight.word, no.word] == ["fits", "tight", "no"]
    assert fits.margin_bytes > 0 > no.margin_bytes
    assert "missing" in no.text
    assert fits.largest == "loss"
    with pytest.raises(PlanError, match=r"more than 0"):
        judge_memory(found, 0)


def test_a_segment_that_is_begun_on_every_stream_may_be_of_no_use() -> None:
    """20 MiB at a time on a GPU: beside the interval of a model as small as they are."""
    unit = UnitFacts("layer", 4, parameters=2**20)
    model = ModelFacts("m", (unit,), 0, 4, 2**22)
    for zero, streams in ((1, 1), (3, 3)):
        plan = Plan(Layout(dp_shard=2, zero=zero), 2, 1, compute="fp32")
        found = [
            predict_memory(PlanningCase(model, Cluster(device, 1, 2, LINK, LINK), plan))
            for device in (Device("d", 1e9, {}, 1e9, kind=kind) for kind in ("gpu", "cpu"))
        ]
        unused = [one.high_bytes - 1.09 * one.peak_bytes for one in found]
        assert unused == pytest.approx([streams * 20 * 2**20, 0.0], abs=1)
