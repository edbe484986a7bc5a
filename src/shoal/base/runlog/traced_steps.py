"""Ranges and collectives of traced steps, as rows of a rank's trace file and as Chrome events.

    traces/steps-A-B-rank-R.json    torch.profiler's trace; beside its events the key "shoal":
        rank, ranks, steps          of the file
        clocks                      [[ns, …], [ns, …]]: ends of the same collectives on all ranks,
                                    before the first step and after the last one
        clock                       name of the machine's clock; ranks of one machine have one name
        ranges                      [kind, name, start_ns, end_ns], kind one of `KINDS`
        flights                     [name, ranks, number, bytes, subject, start_ns, end_ns]

Times are nanoseconds since 1970 by the rank's own clock.
Source: "Trace Event Format", the Chromium project
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

KINDS = ("step", "part", "micro-batch", "action", "wait")
"""Kinds of ranges; each lies inside of one before it, or beside it."""
STEPS_LANE, FIRST_FLIGHT_LANE = 1, 2
Event = dict[str, Any]


@dataclass
class TracedRange:
    """A range of a traced step on the training thread.

    Attributes:
        kind: one of `KINDS`.
        name: as "backward" or "F2@1".
        start_ns, end_ns: since 1970; end 0: it has not ended.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int = 0


@dataclass
class Flight:
    """One collective or message, from its call until it is done.

    Attributes:
        name: as all_reduce, send, receive.
        ranks: of its group; of a message the sender and the receiver.
        number: of the calls of this name by these ranks, from 0; all of them count alike.
        payload_bytes: bytes of this rank's tensors.
        subject: what it carries, as "bucket 3"; "": unknown.
        start_ns, end_ns: since 1970; end 0: it has not ended.
    """

    name: str
    ranks: tuple[int, ...]
    number: int
    payload_bytes: int
    subject: str
    start_ns: int
    end_ns: int = 0

    @property
    def title(self) -> str:
        """Return the text of an event.

        >>> Flight("all_reduce", (0, 1), 0, 2048, "bucket 3", 0).title
        'all_reduce bucket 3'
        """
        return f"{self.name} {self.subject or f'{self.payload_bytes:,} B'}"


TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no rank before all ranks have begun them."""

CallKey = tuple[str, tuple[int, ...], int]


def call_key(flight: Flight) -> CallKey:
    """Return what the same call has on all its ranks; a message's two ends are one call."""
    name = "message" if flight.name in ("send", "receive") else flight.name
    return name, flight.ranks, flight.number


def read_clock_name() -> str:
    """Return a text that is equal for processes that read the same wall clock; "" if unknown."""
    try:  # new after each start of a machine; containers of one kernel share its clock
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def encode_rows(ranges: Iterable[TracedRange], flights: Iterable[Flight]) -> dict[str, Any]:
    """Return ended ranges and flights as JSON."""
    return {
        "ranges": [list(astuple(one)) for one in ranges if one.end_ns],
        "flights": [list(astuple(one)) for one in flights if one.end_ns],
    }


def decode_rows(found: dict[str, Any]) -> tuple[list[TracedRange], list[Flight]]:
    """Return the ranges and flights of a file.

    Raises:
        KeyError, TypeError, ValueError: the rows have another form.
    """
    ranges = [TracedRange(str(k), str(n), int(a), int(b)) for k, n, a, b in found["ranges"]]
    flights = [
        Flight(str(name), tuple(map(int, ranks)), int(n), int(size), str(what), int(a), int(b))
        for name, ranks, n, size, what, a, b in found["flights"]
    ]
    return ranges, flights


def chrome_events(
    pid: int, ranges: Sequence[TracedRange], flights: Sequence[Flight], zero_ns: int
) -> list[Event]:
    """Return ranges and flights as events of one process of a Chrome trace.

    Args:
        pid: number of the process in the trace.
        zero_ns: time at which the trace's microseconds begin.

    Returns:
        Steps and what they contain in one lane; flights that overlap in lanes of their own.
    """
    lanes = assign_lanes(flights)
    names = ["steps", *(f"collectives {n + 1}" for n in range(max(lanes, default=-1) + 1))]
    events: list[Event] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": STEPS_LANE + n,
            "args": {"name": name},
        }
        for n, name in enumerate(names)
    ]
    events += [
        _event(one.name, one.kind, pid, STEPS_LANE, one.start_ns, one.end_ns, zero_ns, {})
        for one in ranges
    ]
    for lane, one in zip(lanes, flights, strict=True):
        more = {"ranks": list(one.ranks), "number": one.number, "bytes": one.payload_bytes}
        if one.subject:
            more["subject"] = one.subject
        tid = FIRST_FLIGHT_LANE + lane
        events.append(
            _event(one.title, "collective", pid, tid, one.start_ns, one.end_ns, zero_ns, more)
        )
    return events


def assign_lanes(flights: Sequence[Flight]) -> list[int]:
    """Return a lane for each flight, so that those of a lane do not overlap.

    >>> spans = [
    ...     Flight("send", (0, 1), n, 0, "", a, b)
    ...     for n, (a, b) in enumerate([(0, 5), (1, 2), (3, 9)])
    ... ]
    >>> assign_lanes(spans)
    [0, 1, 1]
    """
    ends: list[int] = []
    found = [0] * len(flights)
    for at in sorted(range(len(flights)), key=lambda n: flights[n].start_ns):
        one = flights[at]
        lane = next((n for n, end in enumerate(ends) if end <= one.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane], found[at] = one.end_ns, lane
    return found


def _event(
    name: str, kind: str, pid: int, tid: int, start_ns: int, end_ns: int, zero_ns: int, more: Event
) -> Event:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": (start_ns - zero_ns) / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": more,
    }
