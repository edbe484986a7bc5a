"""Checks of a merged trace: its form, nesting, and the order of calls on all ranks.

form       every event has what the format demands, and finite numbers
nesting    two events of one thread lie one inside the other, or apart
calls      every rank of a group made each call; none ends before the last rank has begun it
messages   no message arrives before it was sent
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.base.runlog.traced_steps import TOGETHER, Event, call_key
from shoal.view.traces.rank_traces import RankTrace
from shoal.view.traces.trace_summary import find_joined

TOLERANCE_US = 1.0
"""Rounding of times that the profiler writes."""
LEAST_CLOCK_NS = 200_000
"""Least difference of two clocks that counts: threads note ends so much later on a busy host."""
MOST_FAULTS = 20


def find_trace_faults(document: dict[str, Any], traces: Sequence[RankTrace]) -> list[str]:
    """Return what is wrong in a merged trace, each in one line; [] for a sound one.

    Args:
        document: the merged trace.
        traces: those of the ranks, on the common clock.
    """
    events = document.get("traceEvents", [])
    faults = [*_form_faults(events)]
    faults += faults or [*_nesting_faults(events)]
    return [*faults, *_call_faults(traces)][:MOST_FAULTS]


def _form_faults(events: Sequence[Event]) -> Iterator[str]:
    for number, event in enumerate(events):
        kind = event.get("ph")
        where = f"event {number} ({event.get('name')})"
        if kind not in ("X", "M", "B", "E", "s", "t", "f", "i", "C"):
            yield f"{where}: phase {kind!r} is none of the format"
        elif not (isinstance(event.get("pid"), int) and isinstance(event.get("tid"), int)):
            yield f"{where}: pid and tid are no numbers"
        elif not isinstance(event.get("name"), str):
            yield f"{where}: has no name"
        elif kind == "M" and not isinstance(event.get("args"), dict):
            yield f"{where}: metadata without args"
        elif kind != "M" and not _is_time(event.get("ts")):
            yield f"{where}: time {event.get('ts')!r}"
        elif kind == "X" and not (_is_time(event.get("dur")) and event["dur"] >= 0):
            yield f"{where}: length {event.get('dur')!r}"
        elif kind in "stf" and "id" not in event:
            yield f"{where}: a flow without id"


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _nesting_faults(events: Sequence[Event]) -> Iterator[str]:
    lanes: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
    for (pid, tid), spans in lanes.items():
        spans.sort(key=lambda one: (one[0], -one[1]))
        around: list[tuple[float, float, str]] = []
        for start, end, name in spans:
            while around and around[-1][1] <= start + TOLERANCE_US:
                around.pop()
            if around and end > around[-1][1] + TOLERANCE_US:
                yield (
                    f"process {pid}, thread {tid}: {name} ends {end - around[-1][1]:.1f} µs after "
                    f"{around[-1][2]}, in which it begins"
                )
            around.append((start, end, name))


def _call_faults(traces: Sequence[RankTrace]) -> Iterator[str]:
    joined = find_joined(traces)
    error_ns = LEAST_CLOCK_NS + 4 * max(trace.clock.error_ns for trace in traces)
    callers: dict[Any, set[int]] = defaultdict(set)
    for trace in traces:
        for one in trace.flights:
            callers[call_key(one)].add(trace.rank)
            early = joined[call_key(one)] - one.end_ns
            if one.name in (*TOGETHER, "receive") and early > error_ns:
                word = "arrives" if one.name == "receive" else "ends"
                yield (
                    f"rank {trace.rank}: {one.title}, call {one.number}, {word} "
                    f"{early / 1e6:.3f} ms before all of {list(one.ranks)} have begun it"
                )
    for (name, ranks, number), made in callers.items():
        if missing := sorted(set(ranks) - made):
            yield f"{name} of {list(ranks)}, call {number}: not made by {missing}"
