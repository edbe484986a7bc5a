"""The step-time model: its parts add up, its arithmetic agrees with the formulas, its fit recovers."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from fit import fit_steps, nnls_normal
from planned_case import case_of

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Calibration, Cluster, Device, Link
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.base.layouts.layout import Layout
from shoal.forecast.machines.calibrations import CPU, FITTED, GPU, calibration_of
from shoal.forecast.memory.model_states import rank_elements
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import Kernels, transformer_facts
from shoal.forecast.time.step_sync import BUCKET_BYTES
from shoal.forecast.time.step_terms import step_terms
from shoal.forecast.time.step_time import CoefficientTable, exposed_terms, predict_time
from shoal.forecast.time.step_work import peak_flops_per_s
from traffic_theory import Payload, step_traffic

SMALL = TransformerShape("small", 6, 256, 4, 4, 768, 2048)
FACTS = transformer_facts(SMALL, 256, 4, Kernels(fused_norm=False))
LARGE = transformer_facts(TransformerShape("large", 32, 4096, 32, 8, 14336, 128256), 4096, 2)
GLOO = Link("gloo", 1e-4, 1e9)
CORES = Device("2 cores", 2**33, {"fp32": 6e10, "fp64": 3e10}, 1e10, launch_s=4e-6, kind="cpu")
HERE = Cluster(CORES, 1, 4, GLOO, GLOO)
ARITHMETIC = Calibration(efficiency={"matrix": 1.0})
H100 = Cluster(
    Device("H100", 8e10, {"bf16": 989e12}, 3e12, launch_s=7e-6),
    4, 8, Link("nvlink", 6e-6, 320e9), Link("ib", 1e-5, 46e9),
)  # fmt: skip

LAYOUTS = {
    "single": Layout(),
    "ddp": Layout(dp_replicate=4),
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2": Layout(dp_shard=4, zero=2),
    "fsdp": Layout(dp_shard=4, zero=3),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
}


def here(layout: Layout, accumulate: int = 3, **more: object) -> PlanningCase:
    batch = 2 * accumulate * layout.data_degree
    return case_of(FACTS, layout, HERE, batch, 2, compute="fp32", **more)  # type: ignore[arg-type]


def large(layout: Layout, micro_batch: int = 1, batch: int = 64, **more: object) -> PlanningCase:
    return case_of(LARGE, layout, H100, batch, micro_batch, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("defer", [False, True])
def test_bytes_are_the_traffic_formulas(name: str, defer: bool) -> None:
    layout = LAYOUTS[name]
    case = here(layout, defer_sync=defer)
    blocks = FACTS.units[1].parameters * 6
    payload = Payload(
        FACTS.trainable * 4, FACTS.trainable * 4, blocks * 4, (FACTS.trainable - blocks) * 4
    )
    expected = step_traffic(layout, payload, accumulate=3, defer_sync=defer).total_bytes
    assert sum(predict_time(case).bytes.values()) == pytest.approx(expected)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp_gathers_bare_layers_once_with_the_root(mixed: bool, defer: bool) -> None:
    """Of six equal blocks, all or two are bare layers, before the others."""
    embedding, block, *rest = FACTS.units
    bare = replace(block, count=2 if mixed else 6, rooted_parameters=block.parameters)
    units = (embedding, bare, *([replace(block, count=4)] if mixed else []), *rest)
    case = replace(here(LAYOUTS["fsdp"], defer_sync=defer), model=replace(FACTS, units=units))
    inside, whole = block.parameters * (4 if mixed else 0) * 4, FACTS.trainable * 4
    payload = Payload(whole, whole, inside, whole - inside)
    sent = step_traffic(LAYOUTS["fsdp"], payload, accumulate=3, defer_sync=defer).total_bytes
    assert sum(predict_time(case).bytes.values()) == pytest.approx(sent)


def test_on_cores_everything_sent_is_waited_for() -> None:
    wide = transformer_facts(replace(SMALL, layers=12, hidden=512, ffn=1536), 256, 4)
    assert wide.trainable * 4 > 3 * BUCKET_BYTES  # a GPU would hide all but the last bucket
    ring = 2 * 2 * 1e-4 + 2 * 3 / 4 * wide.trainable * 4 / 1e9  # halving, doubling: a ring's bytes
    estimate = predict_time(replace(here(LAYOUTS["ddp"]), model=wide))
    assert estimate.parts["gradients"] == pytest.approx(ring)
    assert estimate.hidden == {}
    alone = predict_time(replace(here(LAYOUTS["single"]), model=wide))
    assert estimate.step_s - alone.step_s == pytest.approx(ring)


def test_a_gpu_hides_gradients_beside_its_backward_pass() -> None:
    case = large(Layout(dp_replicate=32), batch=256)
    hidden = predict_time(case)
    bare = predict_time(replace(case, framework="megatron-deepspeed", cluster=replace(
        H100, calibration=GPU)))  # fmt: skip
    assert hidden.hidden["gradients_both"] > 0
    assert not bare.hidden
    assert hidden.parts["gradients"] < bare.parts["gradients"]


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS.values(),
        Layout(pp=4, dp_replicate=2, tp=4),
        Layout(dp_shard=8, cp=4, zero=3),
        Layout(pp=2, dp_shard=4, tp=4, zero=2),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_parts_add_up(layout: Layout, recompute: str) -> None:
    estimate = predict_time(large(layout, recompute=recompute))
    assert sum(estimate.parts.values()) == pytest.approx(estimate.step_s)
    assert min(estimate.parts.values()) > 0
    assert estimate.low_s < estimate.step_s < estimate.high_s


def test_terms_and_coefficients_multiply_to_the_step() -> None:
    case = large(Layout(pp=4, dp_replicate=2, tp=4))
    table = CoefficientTable(GPU)
    found = exposed_terms(step_terms(case), table)
    assert sum(table[k] * v for k, v in found.terms.items()) == pytest.approx(found.step_s)


def test_a_pipeline_of_equal_stages_takes_m_plus_p_minus_1() -> None:
    bare = replace(LARGE, units=(
        replace(LARGE.units[0], elementwise_bytes=0.0, operations=0, parameters=0),
        LARGE.units[1],
        replace(LARGE.units[2], forward_flops=0.0, elementwise_bytes=0.0, operations=0,
                loss_bytes=0.0, parameters=0, plain_parameters=0),
    ))  # fmt: skip
    fast = replace(H100, across=Link("ib", 0.0, 1e30), inside=Link("nvlink", 0.0, 1e30),
                   calibration=ARITHMETIC)  # fmt: skip
    case = case_of(bare, Layout(pp=4, tp=8), fast, 16, 1)
    one = exposed_terms(step_terms(case.but(batch=1)), CoefficientTable(ARITHMETIC))
    whole = exposed_terms(step_terms(case), CoefficientTable(ARITHMETIC))
    update = whole.terms["optimizer"] + whole.terms["step"] * 0
    assert (whole.step_s - update) / (one.step_s - update) == pytest.approx((16 + 3) / 4)
    halved = predict_time(
        case.but(layout=Layout(pp=4, tp=8, schedule="interleaved", chunks=2))
    ).parts["bubble"]
    assert halved == pytest.approx(predict_time(case).parts["bubble"] / 2)


def test_the_stage_with_most_blocks_sets_the_pace() -> None:
    """31 blocks on 8 stages: one has 5, and every micro-batch waits for it as with 40 blocks."""
    uneven = transformer_facts(TransformerShape("u", 31, 4096, 32, 8, 14336, 1024), 4096, 2)
    even = transformer_facts(TransformerShape("e", 40, 4096, 32, 8, 14336, 1024), 4096, 2)
    layout = Layout(pp=8, tp=4)
    first, second = (
        predict_time(case_of(facts, layout, H100, 256, 1)).step_s for facts in (uneven, even)
    )
    assert 0.95 * second < first < second


def test_tensor_parallelism_across_nodes_is_slower_than_inside() -> None:
    inside = predict_time(large(Layout(dp_replicate=4, tp=8), batch=32))
    across = predict_time(large(Layout(dp_replicate=2, tp=16), batch=32))
    assert across.parts["tensor"] > 3 * inside.parts["tensor"]


def test_full_recompute_is_a_third_more_compute() -> None:
    none = predict_time(large(Layout(dp_replicate=8)))
    full = predict_time(large(Layout(dp_replicate=8), recompute="full"))
    blocks = LARGE.units[1]
    share = 32 * blocks.forward_flops / LARGE.forward_flops
    own = full.parts["recompute"] / (none.parts["matrix"] + none.parts["elementwise"])
    assert own == pytest.approx(share / 3, rel=0.15)


def test_small_products_wait_for_the_host() -> None:
    tiny = transformer_facts(TransformerShape("tiny", 24, 256, 4, 4, 768, 256), 32, 2)
    case = case_of(tiny, Layout(), H100, 1, 1)
    assert predict_time(case).parts["constants"] > 0.5 * predict_time(case).step_s


def test_offload_costs_time_and_says_so() -> None:
    kept = predict_time(large(Layout(dp_shard=8, zero=3)))
    moved = predict_time(large(Layout(dp_shard=8, zero=3), offload="optimizer"))
    assert moved.parts["offload"] > 10 * kept.parts["optimizer"]
    assert "offload" not in kept.parts
    streamed = predict_time(large(Layout(dp_shard=8, zero=3), offload="activations"))
    assert streamed.parts["offload"] > 0


def test_an_uneven_cluster_waits_for_its_slowest_part() -> None:
    slow = replace(H100, device=replace(H100.device, matrix_flops_per_s={"bf16": 100e12}))
    case = large(Layout(dp_replicate=8))
    mixed = replace(case, cluster=replace(H100, groups=(slow,)))
    assert predict_time(mixed).step_s == predict_time(replace(case, cluster=slow)).step_s


def test_measured_machines_bring_their_own_constants() -> None:
    known = Calibration(
        efficiency={"all_gather": 3.0, "reduce_scatter": 2.0},
        constants_s={"operation": 1e-5, "operation_backward": 3e-5},
    )
    case = here(LAYOUTS["zero1"])
    measured = replace(case, cluster=replace(HERE, calibration=known))
    plain, found = predict_time(case), predict_time(measured)
    assert found.parts["gradients"] == pytest.approx(2 * plain.parts["gradients"])
    assert found.parts["parameters"] == pytest.approx(3 * plain.parts["parameters"])
    operations = sum(unit.operations * unit.count for unit in FACTS.units)
    each_s = operations * 4e-5 * CPU.efficiency["launch"] + CPU.constants_s["micro_batch"]
    assert found.parts["constants"] == pytest.approx(3 * each_s)


def test_which_calibration_counts() -> None:
    assert calibration_of(here(Layout())) is CPU
    assert calibration_of(large(Layout(dp_replicate=8))) is GPU
    published = large(Layout(dp_replicate=8), framework="megatron-deepspeed")
    assert calibration_of(published) is FITTED["megatron-deepspeed", True]
    own = replace(published, cluster=replace(H100, calibration=ARITHMETIC))
    assert calibration_of(own) is ARITHMETIC
    some = Calibration(efficiency={"tensor": 7.0}, source="measured here")
    ladders = {"bf16": ((1e9, 0.5), (1e12, 0.8))}
    measured = replace(H100, calibration=some, device=replace(H100.device, ladders=ladders))
    merged = calibration_of(replace(large(Layout(tp=8)), cluster=measured))
    assert merged.efficiency["tensor"] == 7.0
    assert merged.efficiency["matrix"] == 1.0
    assert merged.efficiency["attention"] == GPU.efficiency["attention"]
    assert merged.source == "measured here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"framework": "megatron-deepspede"}, "try: megatron-deepspeed"),
        ({"recompute": "sel"}, "memory.recompute = sel"),
        ({"layout": Layout(pp=4, schedule="1f2b")}, "try: 1f1b"),
        ({"compute": "fp64"}, "precision.compute = fp64"),
    ],
)
def test_what_is_not_known_is_one_line(change: dict[str, object], words: str) -> None:
    case = large(Layout(dp_replicate=8))
    beside = "framework" in change
    case = replace(case, **change) if beside else case.but(**change)  # type: ignore[arg-type]
    with pytest.raises(PlanError) as caught:
        predict_time(case)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bf16_stands_in_for_fp16() -> None:
    assert peak_flops_per_s(H100.device, "fp16") == 989e12


MOST_CALLS = 900
"""Function calls of one prediction: 0.25 ms on an idle core, and the same on a busy one."""


def test_a_call_is_fast_and_does_not_grow_with_micro_batches() -> None:
    case = large(Layout(pp=8, dp_replicate=2, tp=2), batch=4096)
    calls = {}
    for batch in (64, 65536):
        one = case.but(batch=batch)
        predict_time(one)  # what is kept for all calls is made in the first
        seen: list[str] = []
        sys.setprofile(lambda frame, event, _, seen=seen: seen.append(event))
        try:
            predict_time(one)
        finally:
            sys.setprofile(None)
        calls[batch] = sum(event in ("call", "c_call") for event in seen)
    assert calls[64] < MOST_CALLS
    assert calls[65536] < 1.1 * calls[64]


def test_non_negative_least_squares() -> None:
    gram = [[2.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 1.0]]
    wanted = [1.0, 0.5, 2.0]
    right = [sum(g * x for g, x in zip(row, wanted, strict=True)) for row in gram]
    assert nnls_normal(gram, right) == pytest.approx(wanted)
    # the free minimum would have a negative first coefficient: it stays at 0, the rest re-solves
    assert nnls_normal([[1.0, 0.9], [0.9, 1.0]], [0.5, 1.0]) == pytest.approx([0.0, 1.0])


def runs() -> list[PlanningCase]:
    return [
        large(Layout(pp=pp, dp_replicate=32 // (tp * pp), tp=tp), micro, 128)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for micro in (1, 2, 4)
    ]


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    terms = [step_terms(case) for case in runs()]
    truth = Calibration(
        efficiency={"matrix": 1.5, "attention": 2.0, "elementwise": 1.4, "tensor": 2.0},
        constants_s={"block": 1e-3, "micro_batch": 1e-3, "step": 1e-2},
    )
    times = [exposed_terms(each, CoefficientTable(truth)).step_s for each in terms]
    found = fit_steps(terms, times, replace(GPU, constants_s=truth.constants_s), trust=0.1)
    assert max(map(abs, found.errors)) < 0.01
    # products and attention grow alike in one model: only what they predict can be compared
    other = step_terms(large(Layout(pp=2, dp_replicate=8, tp=2), 8, 128))
    expected = exposed_terms(other, CoefficientTable(truth)).step_s
    assert exposed_terms(other, CoefficientTable(found.calibration)).step_s == pytest.approx(
        expected, rel=0.02
    )
    assert found.calibration.efficiency["tensor"] == pytest.approx(2.0, rel=0.1)


def test_a_disturbed_run_does_not_move_the_fit() -> None:
    terms = [step_terms(case) for case in runs()]
    times = [exposed_terms(each, CoefficientTable(GPU)).step_s for each in terms]
    times[5] /= 3
    start = replace(GPU, efficiency={**GPU.efficiency, "matrix": 1.6, "elementwise": 1.5})
    found = fit_steps(terms, times, start, trust=0.1)
    others = [abs(error) for i, error in enumerate(found.errors) if i != 5]
    assert max(others) < 0.03  # the knee: as much as one row may pull
    assert found.errors[5] > 1.9


def test_what_runs_say_nothing_of_stays_at_its_prior() -> None:
    terms = [step_terms(large(Layout(dp_replicate=8), micro)) for micro in (1, 2, 4)]
    found = fit_steps(terms, [1.0, 0.9, 0.85], GPU).calibration
    assert found.efficiency["tensor"] == GPU.efficiency["tensor"]


def test_a_fit_without_rows_says_so() -> None:
    with pytest.raises(PlanError, match="needs measured steps"):
        fit_steps([], [], GPU)
    with pytest.raises(PlanError, match="more than 0"):
        fit_steps([step_terms(here(Layout()))], [0.0], CPU)


def test_what_a_framework_hides_after_its_update() -> None:
    case = large(Layout(dp_shard=32, zero=1), batch=256)
    ours, theirs = (predict_time(replace(case, framework=name)) for name in ("shoal", "megatron"))
    assert "parameters_both" not in ours.hidden
    assert theirs.hidden["parameters_both"] > 0
    assert theirs.parts["parameters"] < 0.5 * ours.parts["parameters"]


MIXTRAL = transformer_facts(published_shape("mixtral-8x7b"), 4096, 2)


def mixtral(layout: Layout, batch: int = 64, **more: object) -> PlanningCase:
    return case_of(MIXTRAL, layout, H100, batch, 1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 0), (2, 8), (2, 1), (8, 1)])
def test_a_rank_of_experts_holds_for_time_what_it_holds_for_memory(ep: int, expert_tp: int) -> None:
    layout = Layout(dp_replicate=2, tp=8)
    case = mixtral(layout, ep=ep, expert_tp=expert_tp)
    held = sum(
        unit.count * sum(rank_elements(unit, layout, ep, expert_tp or 8)) for unit in MIXTRAL.units
    )
    (stage,) = step_terms(case).stages
    assert stage.parameters == pytest.approx(held)
    assert stage.device["weights"] * H100.device.stream_bytes_per_s == pytest.approx(
        3 * 2 * sum(
            unit.count * sum(rank_elements(unit, layout, ep, expert_tp or 8))
            for unit in MIXTRAL.units
            if unit.forward_flops > unit.attention_flops
        )
    )  # fmt: skip


def test_experts_are_summed_over_and_split_by_the_few_that_hold_them() -> None:
    whole = mixtral(Layout(dp_shard=8, zero=1))
    spread = mixtral(Layout(dp_shard=8, zero=1), ep=8)
    one, other = step_terms(whole), step_terms(spread)
    experts = sum(unit.count * unit.expert_parameters for unit in MIXTRAL.units)
    dense = MIXTRAL.trainable - experts
    # each expert is on one rank: nothing to send of it, and its rank steps all of its states
    assert other.sync.gradients.inside_bytes == pytest.approx(7 / 8 * dense * 4)
    ratio = other.step["optimizer"] / one.step["optimizer"]
    assert ratio == pytest.approx(1.0)
    half = step_terms(mixtral(Layout(dp_shard=8, zero=3), ep=4))
    sent = half.sync.scatter.inside_bytes * 32 + half.sync.gradients.inside_bytes
    assert sent == pytest.approx((7 / 8 * dense + 1 / 2 * experts / 4) * 4)


def test_a_pipeline_whose_stages_share_nodes_still_crosses_between_two() -> None:
    two = replace(H100, nodes=2)
    terms = step_terms(replace(large(Layout(pp=4, tp=4)), cluster=two))
    assert terms.sent["ib"] > 0
    assert any("pipeline_across" in stage.device for stage in terms.stages)
    inside = step_terms(replace(large(Layout(pp=2, tp=4)), cluster=two))
    assert "ib" not in inside.sent


def test_shards_of_a_pipeline_are_gathered_once_per_step() -> None:
    few, many = (
        step_terms(large(Layout(pp=2, dp_shard=4, zero=3), batch=batch)).sync.total(batch // 4)
        for batch in (32, 256)
    )
    assert few == many
    alone = step_terms(large(Layout(dp_shard=4, zero=3), batch=32)).sync
    assert alone.total(16).inside_bytes == pytest.approx(2 * alone.total(8).inside_bytes, rel=0.5)
    assert alone.total(16) != alone.total(8)
