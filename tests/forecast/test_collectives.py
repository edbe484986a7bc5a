"""Collectives over a cluster: the fastest algorithm, what lies where, who sends what."""

from __future__ import annotations

import pytest

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.forecast.time.collective_time import (
    AxisGroup,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    axis_group,
    send_cost,
)
from shoal.teach.calculators.collectives_costs import (
    ALL_REDUCES,
    hierarchical_all_reduce_s,
    ring_all_gather_s,
)

WIRE = Link("wire", 2e-6, 200e9)
NET = Link("net", 1e-5, 10e9)
CLUSTER = Cluster(Device("d", 1e9, {}, 1e12), nodes=16, per_node=8, inside=WIRE, across=NET)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("size", [1e2, 1e5, 1e9])
def test_inside_a_node_the_fastest_flat_algorithm_counts(ranks: int, size: float) -> None:
    group = axis_group(CLUSTER, ranks, 1)
    link = (WIRE.latency_s, 1 / WIRE.bytes_per_s)
    expected = min(seconds(ranks, size, *link) for seconds in ALL_REDUCES.values())
    assert all_reduce_cost(group, size).seconds == pytest.approx(expected)
    gathered = ring_all_gather_s(ranks, size, *link)
    assert all_gather_cost(group, size).seconds == pytest.approx(gathered)


def test_over_nodes_never_slower_than_three_stages_and_never_above_the_links() -> None:
    group = AxisGroup(32, 8, WIRE, NET, 8)
    for size in (1e3, 1e6, 1e9):
        staged = hierarchical_all_reduce_s(
            8, 4, size, WIRE.latency_s, 1 / WIRE.bytes_per_s, NET.latency_s, 1 / NET.bytes_per_s
        )
        assert all_reduce_cost(group, size).seconds <= staged * (1 + 1e-9)
    # 8 ranks of a node drive 8 cards: no all-reduce of 1 GB beats what leaves the node
    assert all_reduce_cost(group, 1e9).seconds >= 2 * (3 / 4) * 1e9 / (8 * NET.bytes_per_s)


def test_where_a_group_lies() -> None:
    assert axis_group(CLUSTER, 8, 1).suffix == ""
    assert axis_group(CLUSTER, 4, 2).suffix == "_shared"
    assert axis_group(CLUSTER, 16, 8).suffix == "_across"
    both = axis_group(CLUSTER, 16, 2)
    assert (both.suffix, both.near, both.nodes) == ("_both", 4, 4)
    assert axis_group(CLUSTER, 16, 4).near == 2


def test_sent_bytes_are_those_of_the_ring() -> None:
    cost = all_reduce_cost(axis_group(CLUSTER, 8, 1), 800.0)
    assert (cost.inside_bytes, cost.across_bytes) == (pytest.approx(1400.0), 0.0)
    both = all_reduce_cost(axis_group(CLUSTER, 16, 1), 800.0)
    assert both.inside_bytes == pytest.approx(2 * 7 / 8 * 800)
    assert both.across_bytes == pytest.approx(2 * 1 / 2 * 100)
    spread = all_to_all_cost(axis_group(CLUSTER, 16, 1), 1600.0)
    assert (spread.inside_bytes, spread.across_bytes) == (700.0, 800.0)


def test_a_stage_sends_over_the_network_only_if_the_next_is_elsewhere() -> None:
    assert send_cost(CLUSTER, 4, 1e6).across_bytes == 0
    assert send_cost(CLUSTER, 8, 1e6).inside_bytes == 0
    assert send_cost(CLUSTER, 8, 1e6).seconds == pytest.approx(1e-5 + 1e-4)


def test_one_boundary_between_nodes_slows_the_whole_pipeline() -> None:
    assert send_cost(CLUSTER, 4, 1e6, stages=2).across_bytes == 0
    assert send_cost(CLUSTER, 4, 1e6, stages=4).across_bytes == 1e6
    assert send_cost(CLUSTER, 1, 1e6, stages=16) == send_cost(CLUSTER, 8, 1e6)


def test_one_rank_or_no_message_costs_nothing() -> None:
    assert all_reduce_cost(axis_group(CLUSTER, 1, 1), 1e9).seconds == 0
    assert all_gather_cost(axis_group(CLUSTER, 8, 1), 0.0).seconds == 0
