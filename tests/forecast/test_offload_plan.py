"""What the plan says of states that wait elsewhere: how much is where, whether it fits, what to set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_fit import judge_memory
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.memory.framework_memory import framework_memory
from shoal.forecast.memory.offloaded_bytes import device_bytes
from shoal.forecast.memory.transient_memory import sum_rank_elements
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.memory_suggestions import suggest_settings
from shoal.forecast.time.step_time import predict_time
from shoal.planning.pipeline_stages import stage_units

CARD = parse_machines("1xRTX4090-24GB")
LINK = Link("wire", 1e-6, 1e11)
LAPTOP = Cluster(Device("cpu", 16e9, {"fp32": 1e11}, 1e10, kind="cpu"), 1, 1, LINK, LINK)


def thirteen_billion(cluster: Cluster, compute: str, **words: str) -> PlanningCase:
    model = transformer_facts(published_shape("llama-2-13b"), 2048, 2 if compute == "bf16" else 4)
    return PlanningCase(
        model, cluster, Plan(Layout(), 8, 1, compute=compute, recompute="full", **words)
    )


def test_a_13b_on_one_card_is_told_to_wait_on_the_host() -> None:
    alone = thirteen_billion(CARD, "bf16")
    assert judge_memory(predict_memory(alone), CARD.device.memory_bytes).after == "no"
    (settings, found), *_ = suggest_settings(alone)
    assert settings == "memory.offload=parameters"
    assert found.verdict.word == "fits"
    assert found.verdict.starts
    parameters = sum(unit.count * unit.parameters for unit in alone.model.units)
    # masters, gradients, two moments, and the copies that forward passes read
    assert found.memory.host_bytes == pytest.approx((4 + 4 + 8 + 2) * parameters)
    assert found.memory.disk_bytes == 0
    assert found.time.parts["offload"] > found.time.parts["optimizer"]


def test_the_optimizers_state_alone_is_not_enough_for_it() -> None:
    moved = thirteen_billion(CARD, "bf16", offload="optimizer")
    memory = predict_memory(moved)
    assert judge_memory(memory, CARD.device.memory_bytes).word == "no"
    parameters = sum(unit.count * unit.parameters for unit in moved.model.units)
    assert memory.host_bytes == pytest.approx(8 * parameters)
    kept = predict_memory(thirteen_billion(CARD, "bf16"))
    assert kept.parts["optimizer"] - memory.parts["optimizer"] == pytest.approx(8 * parameters)


def test_on_a_cpu_only_files_make_room() -> None:
    plain = thirteen_billion(LAPTOP, "fp32")
    host = thirteen_billion(LAPTOP, "fp32", offload="parameters")
    files = thirteen_billion(LAPTOP, "fp32", offload="parameters", offload_to="files")
    assert predict_memory(host) == predict_memory(plain)
    assert predict_time(host) == predict_time(plain)
    memory = predict_memory(files)
    parameters = sum(unit.count * unit.parameters for unit in plain.model.units)
    assert memory.disk_bytes == pytest.approx(16 * parameters)
    assert not {"weights", "gradients", "optimizer"} & set(memory.parts)
    built, kept = (predict_run(case).instants[0] for case in (files, plain))
    assert built.device_bytes == LAPTOP.device.reserved_bytes
    assert kept.device_bytes == pytest.approx(built.device_bytes + 4 * parameters)
    only = predict_memory(replace(files, plan=replace(files.plan, offload="optimizer")))
    assert only.disk_bytes == pytest.approx(8 * parameters)
    assert only.parts["weights"] == pytest.approx(4 * parameters)


def offloaded(layout: Layout, memory_bytes: float, *sizes: int) -> PlanningCase:
    """A placed plan whose optimizer's state waits on the host; sizes in KiB of each tensor."""
    device = Device("d", memory_bytes, {}, 1e12, kind="gpu")
    data = ("whole", "states", "states", "rows")[layout.zero]
    over = ("dp_shard",) if layout.zero else ("dp_replicate",)
    rows = tuple(
        Placement(str(n), (256 * kib,), "float32", True, sum_over=over, data=data)
        for n, kib in enumerate(sizes)
    )
    plan = Plan(layout, 2, 1, 2, compute="fp32", offload="optimizer", placements=rows)
    elements = 256 * sum(sizes)
    model = ModelFacts("m", (UnitFacts("layer", parameters=elements),), 0, 4, elements)
    return PlanningCase(model, Cluster(device, 1, 2, LINK, LINK), plan)


def held(case: PlanningCase) -> tuple[float, float]:
    """KiB that come for the update, and that stay."""
    stage = stage_units(case, 0)
    found = device_bytes(case, stage, sum_rank_elements(case, stage.units))
    return found.pieces / 1024, found.staying / 1024


DDP = Layout(dp_replicate=2)


def test_three_pieces_of_state_come_at_a_time() -> None:
    """16 MiB / 64 = 256 KiB of parameters: whole tensors, at least one."""
    assert held(offloaded(DDP, 2**24, 200, 300, 100, 100, 200)) == (2 * 700, 0)
    assert held(offloaded(DDP, 2**34, 200, 300, 100, 100, 200)) == (2 * 900, 0)


def test_small_tensors_of_state_stay() -> None:
    assert held(offloaded(DDP, 2**34, 200, 60, 64, 1)) == (2 * 264, 2 * 61)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_brings_the_state_of_what_it_steps(zero: int) -> None:
    """Half of every tensor under zero 3; of the bucket that two ranks share, its own half."""
    halves = held(offloaded(Layout(dp_shard=2, zero=zero), 2**34, 400, 400))
    assert halves == (2 * 400, 0)


def test_the_root_has_been_sent_when_state_comes() -> None:
    """Bare layers under zero 3: their whole gradients are gone before the update."""
    one = offloaded(Layout(dp_shard=2, zero=3), 2**34, 4096)
    layer = UnitFacts("layer", parameters=2**20, operations=1, block="-", rooted_parameters=2**20)
    one = replace(one, model=replace(one.model, units=(layer,)))
    found = predict_memory(one, None, replace(framework_memory("shoal"), workspace_bytes=0.0))
    assert found.when == "backward"
    # Weights and gradients, halves; the root's gradient, and what is sent of it.
    assert found.allocated_bytes / 2**20 == pytest.approx(2 + 2 + 4 + 4)
