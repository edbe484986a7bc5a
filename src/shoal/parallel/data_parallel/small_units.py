"""Report that fsdp's blocks are too small, so that latency dominates the cost of its collectives.

Each block is gathered before its forward and before its backward pass, and its gradients are
reduce-scattered: three collectives per block and micro-batch. Models with few bytes in all blocks
are gathered at once (`base.resharding.gathered_together`). Here there are many blocks, or the link
is slow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.base.text.units import bytes_text, seconds_text
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.forecast.machines.measured_machine import estimate_this_machine, read_measured

WAITS_TO_SENDS = 2.0
"""Blocks count as too small if a collective's latency is this many times its transfer time."""


def cluster_of(world: World) -> Cluster:
    """Return the measured cluster of this machine and rank count, or its kind's usual values."""
    kind = "gpu" if is_accelerator(world.device) else "cpu"
    measured = read_measured(cache_folder(), world.size, kind, torch.get_num_threads())
    return measured or estimate_this_machine(read_machine_facts(), world.size)


def small_units_line(plan: Plan, rows: Iterable[Placement], cluster: Cluster) -> str:
    """Return the line on blocks whose collectives are bound by latency, or "" if they are not.

    Args:
        plan: plan whose layout shards parameters (zero 3).
        rows: placements of the model's parameters and buffers.
        cluster: the machine as measured, or with the usual values of its kind.
    """
    units: dict[str, int] = {}
    for row in rows:
        if row.unit and row.data == "rows" and not row.is_expert:
            units[row.unit] = units.get(row.unit, 0) + row.elements * row.element_bytes
    ranks = plan.layout.dp_shard
    if not units or ranks == 1:
        return ""
    link = cluster.inside if ranks <= cluster.per_node else cluster.across
    mean_bytes = sum(units.values()) / len(units)
    waits_s = (ranks - 1) * link.latency_s
    sends_s = (ranks - 1) / ranks * mean_bytes / link.bytes_per_s
    if waits_s < WAITS_TO_SENDS * sends_s:
        return ""
    count = len(units) * (3 if plan.reshard == "yes" else 2)
    return (
        f"layout.strategy = {plan.layout.strategy}: {len(units)} blocks of "
        f"{bytes_text(mean_bytes)} take {count} collectives a micro-batch, whose latency alone is "
        f"about {seconds_text(count * waits_s)}; try: layout.strategy=zero2, or layout.blocks=NAME "
        f"of larger parts"
    )
