"""Write timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

A rank is a process of the trace, a lane a thread of it, a span a complete event (`ph: X`) with its
start and length in microseconds, held memory a counter (`ph: C`). A time axis in steps instead of
seconds is written as 1 step = 1 ms.

Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.base.plans.timeline import Timeline
from shoal.teach.drawings.timeline_rows import (
    LANES,
    drawn_spans,
    held_by_rank,
    micro_batch_and_stage,
    span_kind,
)

MICROSECONDS = 1e6
STEP_MICROSECONDS = 1e3

Event = dict[str, Any]


def trace_text(timelines: Sequence[Timeline]) -> str:
    """Return the trace file as text; several timelines stand one below the other."""
    return json.dumps(trace_object(timelines), indent=1) + "\n"


def trace_object(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the trace as one object with `traceEvents`, times in µs.

    >>> from shoal.base.plans.timeline import TimelineSpan
    >>> made = trace_object([Timeline("t", 1, (TimelineSpan(0, 0.5, 2.0, "forward", "3"),))])
    >>> [(e["name"], e["ts"], e["dur"]) for e in made["traceEvents"] if e["ph"] == "X"]
    [('F3', 500000.0, 1500000.0)]
    """
    events: list[Event] = []
    first = 0
    for timeline in timelines:
        prefix = f"{timeline.title}: " if len(timelines) > 1 else ""
        events += _names(timeline, first, prefix)
        events += _spans(timeline, first)
        events += _counters(timeline, first)
        first += timeline.ranks
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "titles": [timeline.title for timeline in timelines],
            "units": [
                "seconds" if timeline.unit == "s" else f"1 ms = 1 of {timeline.unit}"
                for timeline in timelines
            ],
            "facts": [dict(timeline.facts) for timeline in timelines],
        },
    }


def _lanes(timeline: Timeline) -> list[str]:
    used = {span.lane for span in timeline.spans}
    return [*LANES, *sorted(used - set(LANES))]


def _names(timeline: Timeline, first: int, prefix: str) -> list[Event]:
    events: list[Event] = []
    used = {(span.rank, span.lane) for span in timeline.spans}
    for rank in range(timeline.ranks):
        pid = first + rank
        about: list[tuple[str, int, Event]] = [
            ("process_name", 0, {"name": f"{prefix}{timeline.member} {rank}"}),
            ("process_sort_index", 0, {"sort_index": pid}),
        ]
        for tid, lane in enumerate(_lanes(timeline)):
            if (rank, lane) in used:
                about.append(("thread_name", tid, {"name": lane}))
        for name, tid, args in about:
            events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})
    return events


def _spans(timeline: Timeline, first: int) -> list[Event]:
    lanes, unit = _lanes(timeline), _unit(timeline)
    events: list[Event] = []
    for span in sorted(drawn_spans(timeline), key=lambda span: (span.rank, span.start_s)):
        label, stage = micro_batch_and_stage(span)
        more = {"note": span.note} if span.note else {}
        if stage is not None:
            more |= {"stage": str(stage), "micro-batch": label}
        events.append(
            {
                "name": f"{span_kind(span).letter}{label}",
                "cat": span.kind,
                "ph": "X",
                "pid": first + span.rank,
                "tid": lanes.index(span.lane),
                "ts": span.start_s * unit,
                "dur": (span.end_s - span.start_s) * unit,
                "args": {"kind": span.kind, **more},
            }
        )
    return events


def _counters(timeline: Timeline, first: int) -> list[Event]:
    unit = _unit(timeline)
    return [
        {
            "name": "held bytes",
            "ph": "C",
            "pid": first + rank,
            "ts": held.time_s * unit,
            "args": held.parts or {"held": held.held_bytes},
        }
        for rank, history in held_by_rank(timeline).items()
        for held in history
    ]


def _unit(timeline: Timeline) -> float:
    return MICROSECONDS if timeline.unit == "s" else STEP_MICROSECONDS
