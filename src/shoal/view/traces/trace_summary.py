"""Seconds of each rank in traced steps: compute, communication alone, hidden, idle.

    compute               the rank does not wait for others; on a GPU: a kernel runs, none of NCCL
    communication alone   it waits, and a collective of its own is under way on all ranks
    hidden                a collective is under way while the rank computes; part of compute.
                          Messages between stages are not in it: when they arrive is not known
    idle                  it waits for ranks that have not called yet, or reads data between steps

Compute, communication alone and idle add up to the time from the first traced step's start to the
last one's end. On a GPU idle is time without any kernel; a kernel of NCCL that waits for a late
rank counts as communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.base.runlog.rank_records import PARTS, RankStep
from shoal.base.runlog.traced_steps import CallKey, Flight, call_key
from shoal.view.traces.rank_traces import RankTrace

Span = tuple[int, int]
Spans = list[Span]


@dataclass(frozen=True)
class RankSummary:
    """Seconds of one rank.

    Attributes:
        rank: its number.
        wall_s: from the first step's start to the last one's end; the sum of the next three.
        compute_s, alone_s, idle_s: as in the module.
        hidden_s: of compute.
        between_s: of idle, between steps.
    """

    rank: int
    wall_s: float
    compute_s: float
    alone_s: float
    idle_s: float
    hidden_s: float
    between_s: float


def summarize_traces(traces: Sequence[RankTrace]) -> list[RankSummary]:
    """Return the summary of each rank."""
    joined = find_joined(traces)
    return [_summarize(trace, joined) for trace in traces]


def find_joined(traces: Sequence[RankTrace]) -> dict[CallKey, int]:
    """Return for each collective the time at which its last rank called it."""
    found: dict[CallKey, int] = {}
    for trace in traces:
        for one in trace.flights:
            key = call_key(one)
            found[key] = max(found.get(key, 0), one.start_ns)
    return found


def _summarize(trace: RankTrace, joined: dict[CallKey, int]) -> RankSummary:
    steps = join_spans((one.start_ns, one.end_ns) for one in trace.ranges if one.kind == "step")
    wall = steps[-1][1] - steps[0][0]
    between = wall - length(steps)
    calls = [one for one in trace.flights if one.name not in ("send", "receive")]
    active = join_spans(_active_span(one, joined) for one in trace.flights)
    waits = join_spans((one.start_ns, one.end_ns) for one in trace.ranges if one.kind == "wait")
    kernels, transfers = _kernels(trace)
    if kernels:
        busy, active = overlap(kernels, steps), overlap(transfers, steps)
        compute, hidden = length(busy), length(overlap(active, busy))
        alone = length(active) - hidden
    else:
        waits, active = overlap(waits, steps), overlap(active, steps)
        alone = length(overlap(waits, active))
        # When a message arrives is known only where the rank waits for it.
        behind = overlap(join_spans(_active_span(one, joined) for one in calls), steps)
        compute, hidden = (
            length(steps) - length(waits),
            length(behind) - length(overlap(behind, waits)),
        )
    idle = wall - compute - alone
    numbers = (one / 1e9 for one in (wall, compute, alone, idle, hidden, between))
    return RankSummary(trace.rank, *numbers)


def _active_span(flight: Flight, joined: dict[CallKey, int]) -> Span:
    start = flight.start_ns
    if flight.name != "send":  # it leaves at once, whoever waits for it
        start = max(start, joined[call_key(flight)])
    return min(start, flight.end_ns), flight.end_ns


def _kernels(trace: RankTrace) -> tuple[Spans, Spans]:
    """Return the times of a device's kernels: those that compute, those of NCCL."""
    base_ns = int(trace.document.get("baseTimeNanoseconds", 0))
    found: tuple[Spans, Spans] = [], []
    for event in trace.document["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X":
            start = trace.clock.common(round(event["ts"] * 1e3) + base_ns)
            sends = "nccl" in str(event.get("name", "")).lower()
            found[sends].append((start, start + round(event["dur"] * 1e3)))
    return join_spans(found[0]), join_spans(found[1])


def join_spans(spans: Iterable[Span]) -> Spans:
    """Return the union of spans, ascending and apart.

    >>> join_spans([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def overlap(first: Spans, second: Spans) -> Spans:
    """Return where two unions overlap.

    >>> overlap([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    found: Spans = []
    one = other = 0
    while one < len(first) and other < len(second):
        start = max(first[one][0], second[other][0])
        end = min(first[one][1], second[other][1])
        if start < end:
            found.append((start, end))
        if first[one][1] <= second[other][1]:
            one += 1
        else:
            other += 1
    return found


def length(spans: Spans) -> int:
    """Return the summed length of apart spans."""
    return sum(end - start for start, end in spans)


COMPUTING = ("passes", "backward", "sum", "update", "hooks")


def differs_from_phases(trace: RankTrace, records: Sequence[RankStep]) -> float | None:
    """Return how far compute and waits are from the run's own seconds by part, as a share.

    Waits of the first step count with those before it in its row, so they are left out.

    Args:
        trace: of a rank.
        records: rows of `rank_steps`.

    Returns:
        The larger difference of the two ÷ the steps' time; None if a step has no row.
    """
    own = {
        one.step: dict(zip(PARTS, one.seconds, strict=True))
        for one in records
        if one.rank == trace.rank and one.steps == 1
    }
    first, last = trace.steps
    if not set(range(first, last + 1)) <= own.keys():
        return None
    steps = [(one.start_ns, one.end_ns) for one in trace.ranges if one.kind == "step"]
    waits = join_spans((one.start_ns, one.end_ns) for one in trace.ranges if one.kind == "wait")
    compute_s = (length(steps) - length(overlap(waits, join_spans(steps)))) / 1e9
    waited_s = length(overlap(waits, [(steps[0][1], steps[-1][1])])) / 1e9
    sums = {part: sum(own[step][part] for step in range(first, last + 1)) for part in COMPUTING}
    waiting = sum(own[step]["waiting"] for step in range(first + 1, last + 1))
    whole = sum(sums.values()) + waiting
    return max(abs(compute_s - sum(sums.values())), abs(waited_s - waiting)) / whole
