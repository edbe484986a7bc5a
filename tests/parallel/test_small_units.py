"""The line on fsdp's blocks that are too small for its collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.base.estimates.cluster import Link
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan
from shoal.forecast.machines.measured_machine import estimate_this_machine
from shoal.parallel.data_parallel.small_units import small_units_line

LAPTOP = replace(
    estimate_this_machine(MachineFacts(cores=2, memory_bytes=2**34, gpus=0), 2),
    inside=Link("gloo", 5e-4, 5e8),
)
FSDP = Plan(Layout(dp_shard=2, zero=3), 16, micro_batch=8, accumulate=1)


def blocks(count: int, elements: int) -> list[Placement]:
    rows = [
        Placement(f"blocks.{n}.weight", (elements,), "float32", data="rows", unit=f"blocks.{n}")
        for n in range(count)
    ]
    return [*rows, Placement("head.weight", (elements,), "float32", data="rows")]


@pytest.mark.parametrize(
    ("plan", "count", "seconds"),
    [
        (FSDP, 900, "450.0 ms"),
        (replace(FSDP, reshard="no"), 600, "300.0 ms"),
    ],
)
def test_many_small_blocks_are_told(plan: Plan, count: int, seconds: str) -> None:
    assert small_units_line(plan, blocks(300, 8192), LAPTOP) == (
        f"layout.strategy = fsdp: 300 blocks of 32.0 KiB take {count} collectives a micro-batch, "
        f"whose latency alone is about {seconds}; try: layout.strategy=zero2, or layout.blocks=NAME "
        f"of larger parts"
    )


@pytest.mark.parametrize(
    ("count", "elements", "more"),
    [
        (300, 2**20, {}),  # 4 MiB each: bytes cost more than latency
        (300, 8192, {"layout": Layout(dp_replicate=2)}),  # nothing is gathered
    ],
)
def test_others_get_no_line(count: int, elements: int, more: dict[str, Any]) -> None:
    assert small_units_line(replace(FSDP, **more), blocks(count, elements), LAPTOP) == ""


def test_ranks_on_several_machines_wait_for_the_network() -> None:
    far = replace(LAPTOP, nodes=2, per_node=1, across=Link("net", 1e-3, 1e9))
    assert "about 900.0 ms" in small_units_line(FSDP, blocks(300, 8192), far)
