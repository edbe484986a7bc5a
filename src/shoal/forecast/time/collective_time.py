"""Seconds and bytes of collectives on one mesh axis of a cluster.

An axis of the layout is a *group*: n ranks, of which g share a node (a fast link); the network (a
slow link) reaches the others. Of every collective the fastest known algorithm counts:

    one node, or one rank per node   ring, tree, halving and doubling over that one link
    g ranks on each of G nodes       three stages: inside, over the nodes with M/g, inside;
                                     or one ring over all n, as fast as its slower link, where the
                                     g ranks of a node drive g cards: min(inside, g · across)
    all-to-all                       M/n to each rank, both links at once
    sending to the next stage        α + M/bandwidth; over the network if any stage boundary is one
                                     between nodes: every micro-batch passes it

M is the whole message. The bytes that one rank sends are counted per link; every rank sends the
same number.
Sources: teach/calculators/collectives_costs.py for the algorithms; Narayanan et al. 2021 §5.9 and
AutoParallel's notes for rings that share a node's network cards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.base.estimates.cluster import Cluster, Link


@dataclass(frozen=True)
class AxisGroup:
    """Process group of an axis: `ranks` in all, `near` of them on each of its nodes."""

    ranks: int
    near: int
    inside: Link
    across: Link
    per_node: int = 0

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the group."""
        return -(-self.ranks // self.near)

    @property
    def only_link(self) -> Link | None:
        """Return the only kind of link that this group uses; None if it uses both."""
        if self.near == self.ranks:
            return self.inside
        return self.across if self.near == 1 else None

    @property
    def suffix(self) -> str:
        """Return the suffix of term names for the group's placement: each has its own efficiency.

        ""         fills a node · "_shared"  one of several groups inside a node
        "_across"  one rank per node · "_both"  several ranks on each of several nodes

        >>> link = Link("wire", 0.0, 1.0)
        >>> [AxisGroup(n, g, link, link, 8).suffix for n, g in ((8, 8), (4, 4), (16, 1), (16, 8))]
        ['', '_shared', '_across', '_both']
        """
        if self.near < self.ranks:
            return "_across" if self.near == 1 else "_both"
        return "_shared" if self.ranks < self.per_node else ""


def axis_group(cluster: Cluster, ranks: int, stride: int) -> AxisGroup:
    """Return the group of an axis of degree `ranks` whose neighbours are `stride` ranks apart.

    Args:
        stride: product of the degrees of the axes inside this one (tp: 1).

    >>> link = Link("wire", 0.0, 1.0)
    >>> from shoal.base.estimates.cluster import Device
    >>> cluster = Cluster(Device("d", 1, {}, 1), 4, 8, link, link)
    >>> [axis_group(cluster, n, s).near for n, s in ((8, 1), (16, 1), (8, 4), (4, 8), (2, 4))]
    [8, 8, 2, 1, 2]
    """
    near = max(1, min(ranks, cluster.per_node // stride))
    return AxisGroup(ranks, near, cluster.inside, cluster.across, cluster.per_node)


@dataclass(frozen=True)
class CollectiveCost:
    """Seconds of a collective, and the bytes that one rank sends over each link."""

    seconds: float = 0.0
    inside_bytes: float = 0.0
    across_bytes: float = 0.0

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        return CollectiveCost(
            self.seconds + other.seconds,
            self.inside_bytes + other.inside_bytes,
            self.across_bytes + other.across_bytes,
        )

    def times(self, count: float) -> CollectiveCost:
        """Return the cost of the same collective `count` times.

        >>> CollectiveCost(1.0, 2.0, 3.0).times(2)
        CollectiveCost(seconds=2.0, inside_bytes=4.0, across_bytes=6.0)
        """
        return CollectiveCost(
            self.seconds * count, self.inside_bytes * count, self.across_bytes * count
        )

    def slow_down(self, times: float) -> CollectiveCost:
        """Return the cost with the same bytes in `times` the seconds.

        >>> CollectiveCost(1.0, 2.0, 3.0).slow_down(2)
        CollectiveCost(seconds=2.0, inside_bytes=2.0, across_bytes=3.0)
        """
        return CollectiveCost(self.seconds * times, self.inside_bytes, self.across_bytes)


NOTHING = CollectiveCost()


def _cost_on_link(
    group: AxisGroup, link: Link, seconds: float, sent_bytes: float
) -> CollectiveCost:
    inside = link is group.inside
    return CollectiveCost(seconds, sent_bytes if inside else 0.0, 0.0 if inside else sent_bytes)


def broadcast_rounds(ranks: int) -> int:
    """Count the rounds of a broadcast whose holders double every round: ⌈log2 ranks⌉.

    >>> [broadcast_rounds(n) for n in (1, 2, 3, 8, 9)]
    [0, 1, 2, 3, 4]
    """
    return (ranks - 1).bit_length()


def ring_all_reduce_s(ranks: int, message_bytes: float, link: Link) -> float:
    """Return the seconds of a ring all-reduce over equal links: 2(n−1)·α + 2(n−1)/n·M·β."""
    return 2 * (ranks - 1) * (link.latency_s + message_bytes / link.bytes_per_s / ranks)


def _flat_all_reduce_s(ranks: int, message_bytes: float, link: Link) -> float:
    """Return the seconds of the fastest of ring, tree, and halving and doubling."""
    wire_s = message_bytes / link.bytes_per_s
    ring = ring_all_reduce_s(ranks, message_bytes, link)
    tree = 2 * (broadcast_rounds(ranks) * link.latency_s + wire_s)
    if ranks & (ranks - 1):
        return min(ring, tree)
    halving = 2 * broadcast_rounds(ranks) * link.latency_s + 2 * (ranks - 1) / ranks * wire_s
    return min(ring, tree, halving)


def _ring_over_nodes_s(group: AxisGroup, message_bytes: float, passes: int) -> float:
    """Return the seconds of one ring through all nodes; `passes`: 2 all-reduce, 1 all-gather."""
    near, nodes, ranks = group.near, group.nodes, group.ranks
    rate = min(group.inside.bytes_per_s, near * group.across.bytes_per_s)
    hops_s = (ranks - nodes) * group.inside.latency_s + (nodes - 1) * group.across.latency_s
    return passes * (hops_s + (ranks - 1) / ranks * message_bytes / rate)


def all_reduce_cost(group: AxisGroup, message_bytes: float) -> CollectiveCost:
    """Return the cost of summing M bytes on all ranks.

    >>> wire, net = Link("wire", 0.0, 8.0), Link("net", 0.0, 1.0)
    >>> all_reduce_cost(AxisGroup(4, 4, wire, net), 16.0)
    CollectiveCost(seconds=3.0, inside_bytes=24.0, across_bytes=0.0)
    >>> all_reduce_cost(AxisGroup(8, 4, wire, net), 16.0).across_bytes
    4.0
    """
    return _staged_cost(group, message_bytes, 2, _flat_all_reduce_s)


def _staged_cost(
    group: AxisGroup,
    message_bytes: float,
    passes: int,
    flat_s: Callable[[int, float, Link], float],
) -> CollectiveCost:
    """Return the cost of the cheaper of two ways: inside nodes and then across, or one ring.

    Args:
        passes: times that a rank's share crosses a link: 2 for an all-reduce, 1 for an all-gather.
        flat_s: seconds on one link, by ranks, bytes and the link.
    """
    ranks = group.ranks
    if ranks == 1 or message_bytes <= 0:
        return NOTHING
    link = group.only_link
    if link is not None:
        sent = passes * (ranks - 1) / ranks * message_bytes
        return _cost_on_link(group, link, flat_s(ranks, message_bytes, link), sent)
    near, nodes = group.near, group.nodes
    staged = passes * _gather_s(near, message_bytes, group.inside)
    staged += flat_s(nodes, message_bytes / near, group.across)
    return CollectiveCost(
        min(staged, _ring_over_nodes_s(group, message_bytes, passes)),
        passes * (near - 1) / near * message_bytes,
        passes * (nodes - 1) / nodes * message_bytes / near,
    )


def _gather_s(ranks: int, message_bytes: float, link: Link) -> float:
    return (ranks - 1) * (link.latency_s + message_bytes / ranks / link.bytes_per_s)


def all_gather_cost(group: AxisGroup, message_bytes: float) -> CollectiveCost:
    """Return the cost of an all-gather of M bytes in total; a reduce-scatter costs the same.

    >>> wire, net = Link("wire", 0.0, 8.0), Link("net", 0.0, 1.0)
    >>> all_gather_cost(AxisGroup(4, 4, wire, net), 16.0)
    CollectiveCost(seconds=1.5, inside_bytes=12.0, across_bytes=0.0)
    """
    return _staged_cost(group, message_bytes, 1, _gather_s)


def all_to_all_cost(group: AxisGroup, message_bytes: float) -> CollectiveCost:
    """Return the cost of an all-to-all: each rank sends an n-th of its M bytes to every other.

    >>> wire, net = Link("wire", 0.0, 8.0), Link("net", 0.0, 1.0)
    >>> all_to_all_cost(AxisGroup(8, 4, wire, net), 16.0)
    CollectiveCost(seconds=8.0, inside_bytes=6.0, across_bytes=8.0)
    """
    ranks, near = group.ranks, group.near
    if ranks == 1 or message_bytes <= 0:
        return NOTHING
    inside = (near - 1) / ranks * message_bytes
    across = (ranks - near) / ranks * message_bytes
    inside_s = (near - 1) * group.inside.latency_s + inside / group.inside.bytes_per_s
    across_s = (ranks - near) * group.across.latency_s + across / group.across.bytes_per_s
    return CollectiveCost(max(inside_s, across_s), inside, across)


def send_cost(
    cluster: Cluster, stride: int, message_bytes: float, stages: int = 2
) -> CollectiveCost:
    """Return the cost of one message to the next of `stages` stages, `stride` ranks away.

    It uses the network if the stages do not all fit a node: the slowest boundary limits a pipeline.

    >>> wire, net = Link("wire", 0.0, 8.0), Link("net", 0.0, 1.0)
    >>> from shoal.base.estimates.cluster import Device
    >>> cluster = Cluster(Device("d", 1, {}, 1), 2, 4, wire, net)
    >>> send_cost(cluster, 2, 8.0).seconds, send_cost(cluster, 4, 8.0).seconds
    (1.0, 8.0)
    >>> send_cost(cluster, 1, 8.0, stages=4).seconds, send_cost(cluster, 1, 8.0, stages=8).seconds
    (1.0, 8.0)
    """
    if message_bytes <= 0:
        return NOTHING
    near = stride * stages <= cluster.per_node
    link = cluster.inside if near else cluster.across
    seconds = link.latency_s + message_bytes / link.bytes_per_s
    return CollectiveCost(seconds, message_bytes if near else 0.0, 0.0 if near else message_bytes)
