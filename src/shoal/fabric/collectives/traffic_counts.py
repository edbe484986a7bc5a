"""Traffic of a rank: bytes sent by kind of collective and by axis, and seconds spent waiting.

Bytes follow what gloo and NCCL put on the wire per rank (checked against the kernel's counters in
`tests/worlds`): all-reduce 2(n−1)/n · M, all-gather (n−1)/n of the gathered whole,
reduce-scatter (n−1)/n of the whole that is summed, broadcast M, a message to one rank M, all-to-all
what is for other ranks.

The axis of a collective is that of its group (`fabric/axis_worlds.py`): the axes of the layout
along which the group's ranks differ, joined by "+"; "world" for all ranks of several axes.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager

from shoal.wire import phases

ALL_REDUCE, ALL_GATHER, BROADCAST = "all_reduce", "all_gather", "broadcast"
REDUCE_SCATTER = "reduce_scatter"
SEND, RECEIVE = "send", "receive"
ALL_TO_ALL = "all_to_all"
WORLD = "world"
"""Axis of collectives over all ranks of a layout of several axes."""


def wire_bytes(kind: str, payload_bytes: int, degree: int) -> float:
    """Return the bytes that one rank sends for a collective over `degree` ranks.

    payload_bytes: the whole tensor that is reduced, scattered, broadcast, or there after gathering;
    or sent to one rank; of an all-to-all, what this rank has for others.

    >>> wire_bytes("all_reduce", 1000, 4)
    1500.0
    """
    if degree == 1:
        return 0.0
    hops = (degree - 1) / degree
    share = {ALL_REDUCE: 2 * hops, ALL_GATHER: hops, REDUCE_SCATTER: hops}
    return share.get(kind, 1) * payload_bytes


class TrafficCounter:
    """Counters of the bytes that one rank sent and the seconds that it waited for collectives.

    Attributes:
        sent_bytes: bytes by kind of collective.
        axis_bytes: the same bytes by (axis, kind).
        exposed_s: seconds spent waiting; `take()` returns both since the last call, and sets them
            to zero.
        calls: collectives started since the beginning.
        subject: number of the gradient bucket that the next collective sends; None: another.

    `count(kind, payload_bytes, degree, axis)` adds one collective; `with waiting():` adds the time
    inside.
    """

    def __init__(self, *, watched: bool = True) -> None:
        self.page = phases.page if watched else None
        self.sent_bytes: Counter[str] = Counter()
        self.axis_bytes: Counter[tuple[str, str]] = Counter()
        self.exposed_s = 0.0
        self.calls = 0
        self.subject: int | None = None

    def count(self, kind: str, payload_bytes: int, degree: int, axis: str = WORLD) -> None:
        """Add one collective to the counts."""
        self.calls += 1
        self.record_start(kind, payload_bytes)
        self.add_sent(kind, round(wire_bytes(kind, payload_bytes, degree)), axis)

    def add_sent(self, kind: str, sent_bytes: int, axis: str = WORLD) -> None:
        """Add bytes that were sent otherwise than by a collective of a `World`."""
        self.sent_bytes[kind] += sent_bytes
        self.axis_bytes[axis, kind] += sent_bytes

    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        """Return the bytes since the last `pop_counts` by axis and kind, without zeros.

        >>> traffic = TrafficCounter()
        >>> traffic.count(ALL_REDUCE, 1000, 2, "dp_replicate")
        >>> traffic.bytes_by_axis()
        {'dp_replicate': {'all_reduce': 1000}}
        """
        found: dict[str, dict[str, int]] = {}
        for (axis, kind), sent_bytes in self.axis_bytes.items():
            if sent_bytes:
                found.setdefault(axis, {})[kind] = sent_bytes
        return found

    def record_start(self, kind: str, payload_bytes: int = 0) -> None:
        """Report a started call to the watch page, also a barrier or a receive."""
        if self.page is not None:
            self.page.record_collective_start(kind, payload_bytes)

    def waiting(self, count: int = 1) -> AbstractContextManager[None]:
        """Count the time inside as exposed; the calls in `count` are complete afterwards."""
        return _Wait(self, count)

    def pop_counts(self) -> tuple[dict[str, int], float]:
        """Return (bytes by kind, exposed seconds) since the last call, and reset both."""
        totals = dict(self.sent_bytes), self.exposed_s
        self.sent_bytes.clear()
        self.axis_bytes.clear()
        self.exposed_s = 0.0
        return totals


class _Wait(AbstractContextManager[None]):
    """Context of a wait for collectives; a generator would take five calls more.

    Args:
        traffic: of the waiting rank.
        count: collectives that are complete afterwards.
    """

    def __init__(self, traffic: TrafficCounter, count: int) -> None:
        self._traffic, self._count = traffic, count

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()
        if self._traffic.page is not None:
            self._traffic.page.record_wait_start()

    def __exit__(self, *_what: object) -> None:
        if self._traffic.page is not None:
            self._traffic.page.record_wait_end(self._count)
        self._traffic.exposed_s += time.perf_counter() - self._began_s
