"""What each instant of a run holds on devices and hosts, and how the worst one gives the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import MemoryInstant, PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.layout_reasons import explain_start
from shoal.forecast.search.layout_search import LayoutCandidate, judge_candidate
from shoal.forecast.time.step_time import predict_time
from shoal.planning.settle import check_plan_policies

GIB = 2**30
H100S = parse_machines("16x8xH100-80GB")


def case_on(cluster: Cluster, name: str, layout: Layout, **more: object) -> PlanningCase:
    plan = Plan(layout, 512, 1, compute="bf16", recompute="full")
    return replace(
        PlanningCase(transformer_facts(published_shape(name), 8192, 2), cluster, plan), **more
    )


def candidate(case: PlanningCase) -> LayoutCandidate:
    memory = predict_run(case)
    return LayoutCandidate(case, memory, predict_time(case), judge_candidate(case, memory))


def instants(case: PlanningCase) -> dict[str, MemoryInstant]:
    return {one.name: one for one in predict_run(case).instants}


FSDP = Layout(dp_shard=128, zero=3)


def test_a_module_that_every_rank_builds_whole_does_not_fit_a_host() -> None:
    """Eight ranks of a node hold 263 GiB each; a builder runs once per machine."""
    built = candidate(case_on(H100S, "llama-3-70b", FSDP))
    assert built.verdict.word == "fits"
    assert explain_start(built) == ""
    whole = candidate(case_on(H100S, "llama-3-70b", FSDP, handed="host"))
    assert (whole.verdict.word, whole.verdict.after) == ("no", "fits")
    assert (whole.verdict.instant, whole.verdict.place) == ("building", "host")
    assert whole.verdict.text.startswith("no: while building, 2.1 TiB in a node's 1.8 TiB, ")
    assert whole.verdict.text.endswith("missing; its steps: fits")
    assert explain_start(whole) == (
        "while building, each of a node's 8 ranks holds all 70.6B weights: 2.1 TiB in a node's "
        "1.8 TiB; try: give a function that builds the model, which then runs once per "
        "machine, in files"
    )


def test_a_module_that_stands_on_the_device_counts_there() -> None:
    whole = candidate(case_on(H100S, "llama-3-70b", FSDP, handed="device"))
    assert (whole.verdict.word, whole.verdict.place) == ("no", "device")
    assert whole.verdict.text.startswith("no: while building, 274")
    assert "on one device of 79.1 GiB" in whole.verdict.text
    assert "or the module on the CPU" in explain_start(whole)


def test_a_node_whose_memory_nobody_knows_is_not_looked_at() -> None:
    unknown = replace(H100S, node_memory_bytes=0.0)
    assert candidate(case_on(unknown, "llama-3-70b", FSDP, handed="host")).verdict.word == "fits"
    mixed = replace(unknown, groups=(replace(H100S, nodes=1),))
    assert candidate(case_on(mixed, "llama-3-70b", FSDP, handed="host")).verdict.word == "no"


@pytest.mark.parametrize(
    "layout", [FSDP, Layout(tp=8, pp=16), Layout(tp=8, dp_shard=16, zero=3), Layout(pp=8, tp=16)]
)
def test_while_building_a_device_holds_its_share_and_the_largest_unit(layout: Layout) -> None:
    one = case_on(H100S, "llama-3-70b", layout)
    share = 4 * 70.6e9 / 128
    largest = 4 * max(unit.parameters for unit in one.model.units)
    context = H100S.device.reserved_bytes
    held = instants(one)["building"].device_bytes
    # The ends have embedding and head: under zero 3 they are one unit.
    assert share < held - context < 2.2 * share + 2 * largest


def test_layouts_that_keep_whole_weights_hold_them_from_the_beginning() -> None:
    one = case_on(parse_machines("8xH100"), "llama-3-8b", Layout(dp_replicate=8))
    told = instants(one)["building"]
    held = told.device_bytes - H100S.device.reserved_bytes
    assert held == pytest.approx(2 * 4 * 8.03e9, rel=0.01)  # gradients have their buffers
    assert told.host_bytes == pytest.approx(8 * 4 * 8.03e9, rel=0.15)  # every rank builds it
    assert told.files_bytes == 0


def test_a_save_copies_every_byte_once_over_all_ranks() -> None:
    for layout in (Layout(dp_replicate=8), Layout(dp_shard=8, zero=3), Layout(tp=8)):
        held = instants(case_on(parse_machines("8xH100"), "llama-3-8b", layout))
        copied = held["saving"].host_bytes - held["step"].host_bytes
        assert copied == pytest.approx(12 * 8.03e9, rel=0.01)


def test_what_is_offloaded_is_in_the_host() -> None:
    one = case_on(parse_machines("8xH100"), "llama-3-8b", Layout(dp_shard=8, zero=3))
    moved = instants(one.but(offload="optimizer"))["step"].host_bytes
    assert moved - instants(one)["step"].host_bytes == pytest.approx(8 * 8.03e9, rel=0.01)
    there, here = (instants(c)["building"] for c in (one, one.but(offload="parameters")))
    assert there.device_bytes - here.device_bytes == pytest.approx(4 * 8.03e9 / 8, rel=0.01)
    assert here.host_bytes - there.host_bytes == pytest.approx(4 * 8.03e9, rel=0.01)


def test_a_layer_that_is_checked_counts_whole_in_float64() -> None:
    """Under tp and cp: a layer, its largest gradient, and under tp a part of that beside it."""
    node = parse_machines("8xH100")
    layers = [
        UnitFacts(str(n), 1, parameters=size, operations=1, block="-")
        for n, size in enumerate((10**9, 3 * 10**9))
    ]
    bare = case_on(node, "llama-3-8b", Layout(tp=8))
    bare = replace(bare, model=replace(bare.model, units=tuple(layers)))
    context = node.device.reserved_bytes
    assert instants(bare)["checking"].device_bytes - context == pytest.approx(8 * 7.375e9)
    staged = replace(bare, plan=replace(bare.plan, layout=Layout(tp=4, pp=2)))
    assert instants(staged)["checking"].device_bytes - context == pytest.approx(8 * 6.75e9)
    assert "checking" not in instants(bare.but(layout=FSDP))
    told = candidate(bare)
    assert told.verdict.instant != "checking"  # 59 of 80 GB: fits
    larger = replace(bare, model=replace(bare.model, units=(layers[1],) * 3))
    told = candidate(larger)
    assert (told.verdict.word, told.verdict.instant) == ("no", "checking")
    assert "a layer is computed whole in float64" in explain_start(told)


def test_a_proof_counts_where_one_process_could_make_it() -> None:
    """Three copies in float64, which 80 GiB hold of 1.2 billion parameters, not of 8."""
    node = parse_machines("8xH100")
    small = case_on(node, "gpt2-xl", Layout(dp_shard=8, zero=3), proves=True)
    small = replace(small, model=transformer_facts(published_shape("gpt2-xl"), 64, 2))
    held = instants(small)["proving"]
    assert held.device_bytes > 24 * 1.5e9
    large = case_on(node, "llama-3-8b", Layout(dp_shard=8, zero=3), proves=True)
    assert "proving" not in instants(large)
    assert "proving" not in instants(replace(small, proves=False))


def test_resharding_trades_memory_for_bytes() -> None:
    """Whole blocks wait for their backward pass, or a node's part of each, and travel less."""
    one = replace(case_on(H100S, "llama-3-8b", FSDP), loss="chunked")
    found = {
        word: (predict_memory(one.but(reshard=word)), predict_time(one.but(reshard=word)))
        for word in ("yes", "node", "no")
    }
    gathered = {word: memory.parts["gathered"] for word, (memory, _) in found.items()}
    blocks = 2 * (8.03e9 - 2 * 128256 * 4096)
    assert gathered["no"] - gathered["yes"] == pytest.approx(blocks * 30 / 32, rel=0.02)
    assert gathered["node"] - gathered["yes"] == pytest.approx(blocks / 8, rel=0.02)
    across = {word: time.bytes[H100S.across.name] for word, (_, time) in found.items()}
    assert across["yes"] > across["no"] == across["node"]
    inside = found["node"][1].bytes[H100S.inside.name] - found["no"][1].bytes[H100S.inside.name]
    assert inside == pytest.approx(one.accumulate * blocks * 7 / 8, rel=0.02)
    assert found["no"][1].step_s <= found["node"][1].step_s <= found["yes"][1].step_s


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        (Layout(dp_replicate=2), "layout.strategy=fsdp, or fsdp.reshard=yes"),
        (Layout(pp=2, dp_shard=2, zero=3), "fsdp.reshard=yes"),
    ],
)
def test_what_gathers_no_blocks_cannot_keep_them(layout: Layout, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"try: {nearest}$"):
        check_plan_policies(Plan(layout, 8, 1, reshard="no"))


def test_on_cores_what_is_read_becomes_the_optimizers_state() -> None:
    """A checkpoint is in memory once, not once for the host and once for the device."""
    node = parse_machines("2xcpu")
    layout = Layout(dp_replicate=2)
    one = replace(case_on(node, "gpt2-xl", layout), loss="full").but(compute="fp32")
    held = instants(one)
    parameters = one.model.trainable
    own = held["loading"].device_bytes - node.device.reserved_bytes
    # weights, gradients' buffers, what was read (12 bytes an element), a tensor on its way
    assert 20 * parameters < own < 20.5 * parameters
    assert all(instant.host_bytes == 0 for name, instant in held.items() if name != "exporting")
