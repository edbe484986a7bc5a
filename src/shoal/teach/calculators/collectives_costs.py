"""Seconds of all-reduce and all-gather on n ranks, by algorithm.

Every message costs α seconds to start and β seconds per byte (β = 1 / bandwidth of one rank's
link, in one direction), and a rank sends and receives at the same time.

    algorithm                       time for M bytes on n ranks
    ring all-reduce                 2(n−1)·α + 2(n−1)/n·M·β
    ring all-gather, reduce-scatter  (n−1)·α +  (n−1)/n·M·β     M: the whole, gathered message
    tree all-reduce, pipelined      2·log2(n)·α + 2·M·β
    halving and doubling            2·log2(n)·α + 2(n−1)/n·M·β
    hierarchical, g per node        reduce-scatter(g, M) + all-reduce(G, M/g) + all-gather(g, M)

log2(n) is rounded up to whole rounds. If n is no power of two, halving and doubling first folds the
surplus ranks into their neighbours, and unfolds at the end: 2 more messages of M.
Sources: Thakur, Rabenseifner, Gropp 2005 (Optimization of Collective Communication Operations in
MPICH); Patarasuk and Yuan 2009 (rings move the fewest bytes); Sanders, Speck, Träff 2009 (trees).
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.base.errors import PlanError, check_not_negative, check_positive
from shoal.forecast.time.collective_time import broadcast_rounds


def _check(ranks: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float) -> None:
    if ranks < 1:
        raise PlanError(f"ranks = {ranks}: a collective has at least 1; try: ranks=1")
    check_not_negative(
        message_bytes=message_bytes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte
    )


def ring_all_reduce_s(
    ranks: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of a ring all-reduce of M bytes on n ranks: 2(n−1)·α + 2(n−1)/n·M·β.

    Raises:
        PlanError: ranks < 1, or a negative size or cost.

    1 MiB between 2 ranks over 100 Mbit/s takes 84 ms (measured on a shaped link: 89), over
    20 Mbit/s 419 ms (measured: 445).

    >>> [round(ring_all_reduce_s(2, 2**20, 0.0, 8 / rate) * 1e3) for rate in (100e6, 20e6)]
    [84, 419]
    """
    _check(ranks, message_bytes, alpha_s, beta_s_per_byte)
    share = (ranks - 1) / ranks
    return 2 * (ranks - 1) * alpha_s + 2 * share * message_bytes * beta_s_per_byte


def ring_all_gather_s(
    ranks: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of a ring all-gather of M bytes in all; a reduce-scatter takes the same.

    >>> ring_all_gather_s(4, 100.0, 1.0, 1.0)
    78.0
    """
    return ring_all_reduce_s(ranks, message_bytes, alpha_s, beta_s_per_byte) / 2


def tree_all_reduce_s(
    ranks: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of a pipelined tree all-reduce of M bytes: 2·log2(n)·α + 2·M·β.

    Pipelined: the message travels in pieces, so that each byte costs twice and not once per level.

    >>> tree_all_reduce_s(8, 100.0, 1.0, 1.0)
    206.0
    """
    _check(ranks, message_bytes, alpha_s, beta_s_per_byte)
    if ranks == 1:
        return 0.0
    return 2 * broadcast_rounds(ranks) * alpha_s + 2 * message_bytes * beta_s_per_byte


def halving_doubling_s(
    ranks: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of an all-reduce of M bytes by halving, then doubling (Rabenseifner).

    For a power of two it takes as few rounds as a tree and as few bytes as a ring. Else the surplus
    ranks cost one message of M before and one after, and the power of two below does the rest.

    >>> halving_doubling_s(8, 100.0, 1.0, 1.0)
    181.0
    >>> halving_doubling_s(9, 100.0, 1.0, 1.0) == 181 + 2 * (1 + 100)
    True
    """
    _check(ranks, message_bytes, alpha_s, beta_s_per_byte)
    power = 1 << (ranks.bit_length() - 1)
    share = (power - 1) / power
    seconds = 2 * broadcast_rounds(power) * alpha_s + 2 * share * message_bytes * beta_s_per_byte
    if power != ranks:
        seconds += 2 * (alpha_s + message_bytes * beta_s_per_byte)
    return seconds


def hierarchical_all_reduce_s(
    per_node: int,
    nodes: int,
    message_bytes: float,
    inside_alpha_s: float,
    inside_beta_s_per_byte: float,
    across_alpha_s: float,
    across_beta_s_per_byte: float,
) -> float:
    """Return the seconds of a hierarchical all-reduce of M bytes on G nodes of g ranks.

    Three stages: a reduce-scatter inside each node, a ring over the nodes of the g-th part that a
    rank then holds, an all-gather inside. All g ranks of a node use the network at once, so β
    across is ONE rank's share of the node's network.

    >>> hierarchical_all_reduce_s(8, 1, 100.0, 1.0, 1.0, 9.0, 9.0)
    189.0
    >>> hierarchical_all_reduce_s(1, 8, 100.0, 9.0, 9.0, 1.0, 1.0)
    189.0
    """
    inside_s = ring_all_gather_s(per_node, message_bytes, inside_alpha_s, inside_beta_s_per_byte)
    across_s = ring_all_reduce_s(
        nodes, message_bytes / per_node, across_alpha_s, across_beta_s_per_byte
    )
    return 2 * inside_s + across_s


def bus_bytes_per_s(ranks: int, message_bytes: float, seconds: float) -> float:
    """Return the bus bandwidth (`busbw`) of an all-reduce: bytes per second on each link.

    It is the message's own rate M / time, times 2(n−1)/n: comparable for all n, and with the
    hardware.

    >>> bus_bytes_per_s(4, 100e6, 1e-3) / 1e9
    150.0
    """
    _check(ranks, message_bytes, 0.0, 0.0)
    check_positive("1e-6", seconds=seconds)
    return message_bytes / seconds * 2 * (ranks - 1) / ranks


ALL_REDUCES: dict[str, Callable[[int, float, float, float], float]] = {
    "ring": ring_all_reduce_s,
    "tree": tree_all_reduce_s,
    "halving-doubling": halving_doubling_s,
}
"""Flat algorithms by name: ranks, bytes, α, β → seconds."""
