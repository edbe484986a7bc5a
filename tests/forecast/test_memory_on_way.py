"""Bytes on their way between data ranks: counted by hand for each layout, gloo and NCCL."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from planned_case import case_of
from torch.distributed import ProcessGroupGloo

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.layout import Layout
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.bytes_in_flight import (
    BUCKETS_IN_FLIGHT,
    GLOO_THREADS,
    blockwise_moments,
    bytes_in_flight,
    gloo_moments,
    incoming_gradient_bytes,
    is_blockwise,
)
from shoal.forecast.memory.framework_memory import framework_memory
from shoal.forecast.memory.model_states import ParameterElements
from shoal.forecast.memory.transient_memory import HEAP_HOLES, loss_bytes, sharded_bytes
from shoal.parallel.data_parallel import zero
from shoal.planning.pipeline_stages import stage_units

MIB = 2**20
LINK = Link("wire", 1e-6, 1e9)
CPUS = Cluster(Device("cpu", 1e12, {}, 1e10, kind="cpu"), 1, 8, LINK, LINK)
APART = replace(CPUS, per_node=1)
GPUS = replace(CPUS, device=replace(CPUS.device, kind="gpu"))
LAYOUTS = {
    "ddp": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "fsdp": Layout(dp_shard=2, zero=3),
}
EMBEDDING = UnitFacts("embedding", parameters=MIB // 4, operations=1)
BLOCK = UnitFacts("blocks", 4, parameters=MIB, operations=50, saved_split_bytes=8 * MIB)
LAYER = UnitFacts("body.1", 1, parameters=2 * MIB, plain_parameters=MIB, operations=2)


def case(
    layout: str, units: tuple[UnitFacts, ...] = (EMBEDDING, BLOCK), **rest: Any
) -> PlanningCase:
    elements = sum(unit.count * unit.parameters for unit in units)
    model = ModelFacts("m", units, 0, 4, elements)
    given: dict[str, Any] = {"compute": "fp32", "loss": "full", "batch": 2, "micro_batch": 1}
    return case_of(model, LAYOUTS[layout], **{"cluster": CPUS, **given, **rest})


def in_mib(found: tuple[float, ...]) -> list[float]:
    return [size / MIB for size in found]


def test_the_planner_knows_how_many_buckets_are_in_flight() -> None:
    assert BUCKETS_IN_FLIGHT == zero.IN_FLIGHT
    assert GLOO_THREADS == zero.TRANSFERS


@pytest.mark.parametrize("mib", [10, 40, 100])
def test_ddp_sums_in_place(mib: int) -> None:
    assert not any(bytes_in_flight(case("ddp"), ParameterElements(mib * MIB / 4, 0.0)))


def test_narrow_sums_travel_as_copies_until_the_end() -> None:
    found = bytes_in_flight(case("ddp", reduce="bf16"), ParameterElements(40 * MIB / 4, 0.0))
    assert in_mib(found) == [0.0, 0.0, 25 / 2, 40 / 2, 0.0, 0.0]


def test_zero1_receives_two_buckets_on_gloo_and_its_part_on_nccl() -> None:
    """On gloo in memory that stays, from which the own weights are sent, too."""
    elements = ParameterElements(40 * MIB / 4, 0.0)
    assert in_mib(bytes_in_flight(case("zero1"), elements)) == [40.0] * 6
    more = ParameterElements(100 * MIB / 4, 0.0)
    apart = bytes_in_flight(case("zero1", reduce="bf16", cluster=APART), more)
    assert in_mib(apart) == [50.0] * 4 + [100.0, 50.0], "two that are sent, two that arrive"
    near = bytes_in_flight(case("zero1", reduce="bf16"), more)
    assert in_mib(near) == [75.0] * 6, "new weights are wide, and lie there for both ranks"
    on_gpus = bytes_in_flight(case("zero1", cluster=GPUS), elements)
    assert in_mib(on_gpus) == [0.0, 0.0, 12.5, 20.0, 20.0, 0.0]


def test_stepped_weights_travel_two_buckets_at_a_time_on_gloo() -> None:
    """In the memory of transfers, which stays; between machines gloo copies what it is at."""
    assert ProcessGroupGloo._Options()._threads == GLOO_THREADS
    elements = ParameterElements(200 * MIB / 4, 0.0)
    for layout, kept in (("zero1", 2 * 25), ("zero2", 3.5 * 25)):
        found = bytes_in_flight(case(layout), elements)
        assert (found.kept, found.published) == (kept * MIB, kept * MIB)
        apart = bytes_in_flight(case(layout, cluster=APART), elements)
        assert (apart.kept, apart.published) == (kept * MIB, (kept + 2 * 25) * MIB)
        assert bytes_in_flight(case(layout, cluster=GPUS), elements).published == 100 * MIB


def test_zero2_holds_buckets_of_earlier_micro_batches() -> None:
    elements = ParameterElements(10 * MIB / 4, 0.0)
    one, many = (bytes_in_flight(case("zero2", batch=batch), elements) for batch in (2, 8))
    # sent and received, and the own half of the sum; of many micro-batches one that is filled
    assert in_mib(one)[:4] == [25.0] * 4
    assert in_mib(many)[:4] == [35.0] * 4
    on_gpus = bytes_in_flight(case("zero2", batch=8, cluster=GPUS), elements)
    assert in_mib(on_gpus)[:4] == [15.0, 25.0, 25.0, 30.0]
    # of a large model one bucket on its way, one that is full, and half a sum, whatever its size
    for elements in (1e3 * MIB, 1e5 * MIB):
        large = bytes_in_flight(case("zero2", batch=8), ParameterElements(elements, 0.0))
        assert large.last == large.sent == 3.5 * 25 * MIB


def test_zero2_with_late_sums_is_as_zero1() -> None:
    elements = ParameterElements(40 * MIB / 4, 0.0)
    assert bytes_in_flight(case("zero2", defer_sync=True), elements) == bytes_in_flight(
        case("zero1"), elements
    )


def test_one_rank_sends_nothing() -> None:
    alone = case("ddp").but(layout=Layout())
    assert not any(bytes_in_flight(alone, ParameterElements(1e6, 0.0)))


def test_fsdp_on_gloo_block_by_block() -> None:
    """Blocks of 4 MiB and an embedding of 1 MiB, which stays gathered."""
    found = gloo_moments(given := case("fsdp", batch=4), stage_units(given, 0))
    assert found.loss == MIB
    assert found.root == 2.5 * MIB
    gather, work, send, onward, third, last = found.blocks
    assert (gather.gathered, gather.sent) == (MIB + 12 * MIB, 0.0)  # parameters, flat, gloo's copy
    assert (work.gathered, work.works) == (MIB + 8 * MIB, True)
    assert (send.gathered, send.sent) == (MIB + 4 * MIB, 10 * MIB)  # sent, received, the sum
    assert (onward.gathered, onward.sent) == (MIB + 12 * MIB, 4 * MIB)
    # parameters, flat; gradients, and the memory of what was sent and received before
    assert (third.gathered, third.sent, third.through) == (MIB + 8 * MIB, 12 * MIB, 3)
    assert last == third._replace(through=4)
    fresh = gloo_moments(alone := case("fsdp", batch=2), stage_units(alone, 0)).blocks
    assert [one.sent for one in fresh[-2:]] == [12 * MIB + 2 * sums * MIB for sums in (2, 3)]


def turns_of(given: PlanningCase) -> list[tuple[float, float, float]]:
    """MiB gathered, made and sent, freed."""
    stage = stage_units(given, 0)
    found = blockwise_moments(given, framework_memory("shoal"), stage, sharded_bytes(given, stage))
    return [(one.gathered / MIB, one.sent / MIB, one.freed / MIB) for one in found]


def test_fsdp_on_devices_block_by_block() -> None:
    """Blocks of 4 MiB that keep 8, and an embedding of 1 MiB, which stays gathered."""
    turns = turns_of(case("fsdp", cluster=GPUS))
    last, second, first = turns[:3], turns[3:6], turns[9:12]
    # with the next one's flat bytes; its gradients; itself cut again, and what is sent of it
    assert last == [(9, 0, 0), (9, 4, 8), (5, 8, 8)]
    assert second == [(9, 4, 8), (9, 8, 16), (5, 8, 16)]  # beside what the last one sent
    assert first == [(9, 4, 24), (5, 8, 32), (1, 8, 32)]  # flat, then copied: nothing is ahead
    assert turns[12:] == [(0, 2, math.inf)]
    kept = turns_of(case("fsdp", cluster=GPUS, reshard="no"))
    assert kept[0] == (17 + 8, 0, 8)  # forward: the flat bytes of two
    assert kept[1:4] == [(17, 0, 0), (17, 4, 8), (13, 8, 8)]


def test_hsdp_keeps_what_replicas_summed_until_the_pass_is_over() -> None:
    """Half a block, where that is not the gradient itself: one is there already, or on the host."""
    hsdp = Layout(dp_replicate=2, dp_shard=2, zero=3)
    alone = turns_of(case("fsdp", cluster=GPUS))
    fresh = case("fsdp", cluster=GPUS, batch=4).but(layout=hsdp)
    assert turns_of(fresh) == alone
    assert turns_of(fresh.but(batch=8, defer_sync=True)) == alone
    for more in ({"batch": 8}, {"offload": "parameters"}):
        sent = [one[1] for one in turns_of(fresh.but(**more))]
        before = [2 * (place // 3) for place in range(12)]
        assert sent == [old[1] + extra for old, extra in zip(alone, [*before, 8], strict=True)]


def test_a_pipeline_with_all_in_flight_has_no_gradients_yet() -> None:
    """Two blocks a rank, 16 MiB of activations a micro-batch, two of them in flight on rank 0."""
    piped = case("fsdp", cluster=GPUS, batch=4).but(layout=Layout(pp=2, dp_shard=2, zero=3))
    two, four = (predict_memory(piped.but(batch=batch), 0).parts for batch in (4, 8))
    assert two["activations"] == four["activations"] == 32 * MIB
    assert two["gathered"] == four["gathered"] == 9 * MIB
    assert "gradients" not in two
    assert four["gradients"] == 4.5 * MIB
    later = piped.but(layout=replace(piped.layout, schedule="zero-bubble"))
    assert not is_blockwise(later)


def test_the_loss_on_devices_makes_its_gradients_again_scaled() -> None:
    """Where the head is larger than a chunk of logits; blocks are not gathered meanwhile."""
    head = UnitFacts("head", parameters=4 * MIB, input_bytes=MIB, loss_bytes=12 * MIB)
    given = case("fsdp", (EMBEDDING, BLOCK, head), loss="chunked", cluster=GPUS)
    found = predict_memory(given)
    assert found.when == "loss"
    assert found.parts["loss"] == 2 * (16 + 1) * MIB
    assert found.parts["gathered"] == (1 + 16) * MIB
    on_cpu = replace(given, cluster=CPUS)
    assert (
        loss_bytes(on_cpu, framework_memory("shoal"), stage_units(on_cpu, 0)) == (16 + 1 + 8) * MIB
    )


def test_fsdp_leaves_bare_layers_in_the_root() -> None:
    bare = replace(LAYER, rooted_parameters=LAYER.parameters)
    found = gloo_moments(given := case("fsdp", (bare,)), stage_units(given, 0))
    assert not found.blocks
    assert (found.loss, found.root) == (8 * MIB, 16 * MIB)


def test_a_layers_gradient_comes_beside_the_kept_one() -> None:
    kept = case("ddp", (LAYER,))
    assert incoming_gradient_bytes(kept, stage_units(kept, 0)) == 4 * MIB  # of its matrix
    blocks = case("ddp")
    assert incoming_gradient_bytes(blocks, stage_units(blocks, 0)) == 0.0
    fresh = kept.but(layout=Layout(), batch=1)
    again = fresh.but(batch=2)
    more = predict_memory(again).peak_bytes - predict_memory(fresh).peak_bytes
    assert more >= 4 * MIB


def test_a_traced_loss_says_itself_what_it_holds() -> None:
    """Its weight's gradient is there once, however many samples: 2 MiB of 3 in a sample's trace."""
    units = (
        EMBEDDING,
        BLOCK,
        UnitFacts("norm", parameters=8, input_bytes=MIB, operations=7),
        UnitFacts("loss", loss_bytes=3 * MIB, input_bytes=1.5 * MIB, tied_to="embedding"),
    )
    of = case("ddp", units, loss="chunked", batch=2)
    traced = replace(of, model=replace(of.model, source="traced, CPU kernels, batch 2"))
    four = traced.but(micro_batch=4, batch=8)
    one, more = (predict_memory(found).parts["loss"] for found in (traced, four))
    assert (one, more) == (2.5 * MIB + MIB, 4 * 2.5 * MIB + MIB)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_heap_of_a_cpu_has_holes_beside_what_is_allocated(layout: str) -> None:
    """A share of what is temporary, and gradients lie beside the holes although they come later."""
    given = case(layout)
    found = predict_memory(given)
    share, states = HEAP_HOLES[given.layout.zero], ("weights", "gradients", "optimizer")
    alive = found.allocated_bytes - sum(found.parts.get(name, 0.0) for name in states)
    alive -= bytes_in_flight(given, ParameterElements(17 * MIB / 4, 0.0)).kept  # leaves no holes
    gradients = 17 * MIB / (1 if given.layout.zero < 2 else 2) - found.parts.get("gradients", 0.0)
    assert alive > 8 * MIB
    holes = found.parts["allocator"]
    assert holes >= share * alive + gradients - 1
    assert found.peak_bytes == pytest.approx(found.allocated_bytes + holes)
    if layout == "ddp":
        assert holes == pytest.approx(0.65 * 32 * MIB)
    other = predict_memory(case(layout, cluster=GPUS))
    assert other.parts["allocator"] < 0.1 * other.peak_bytes + 32 * MIB
