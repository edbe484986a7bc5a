"""One Chrome trace of all ranks, for Perfetto: a process per rank, and those of its profiler.

Each rank has a process with its steps and collectives, and one for each process of its profiler's
trace (operations by thread, kernels by stream). All times are of rank 0's clock, in microseconds
since the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.traced_steps import KINDS, Event, chrome_events
from shoal.view.traces.rank_traces import RankTrace

OWN = {*KINDS, "collective"}
"""Categories of the events that are written anew, on the common clock."""
KEPT = ("X", "B", "E", "s", "t", "f", "i", "C")
"""Phases of the profiler's events; names of its processes are numbers of the system."""
PROCESSES = 100
"""Most processes of a rank's trace; a rank's numbers begin at rank × this."""
FLOWS = 10**9
"""Most flows of a rank."""


def merge_traces(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the trace of all ranks as one object with `traceEvents`."""
    starts = [one.start_ns for trace in traces for one in trace.ranges]
    zero_ns = min(starts + [one.start_ns for trace in traces for one in trace.flights])
    events: list[Event] = []
    for trace in traces:
        pid = trace.rank * PROCESSES
        events.append(_metadata("process_name", pid, {"name": f"rank {trace.rank}: steps"}))
        events.append(_metadata("process_sort_index", pid, {"sort_index": pid}))
        events += chrome_events(pid, trace.ranges, trace.flights, zero_ns)
        events += _profiled_events(trace, zero_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "steps": list(traces[0].steps),
            "ranks": len(traces),
            "clock_error_us": max(trace.clock.error_ns for trace in traces) / 1e3,
        },
    }


def write_merged(path: Path, document: dict[str, Any]) -> None:
    """Write a merged trace.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, json.dumps(document) + "\n")


def _metadata(name: str, pid: int, about: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": about}


def _profiled_events(trace: RankTrace, zero_ns: int) -> Iterator[Event]:
    """Yield the events of a rank's profiler, with numbers of their own and common times."""
    base_ns = int(trace.document.get("baseTimeNanoseconds", 0))
    labels = _process_labels(trace)
    pids: dict[Any, int] = {}
    tids: dict[Any, int] = {}
    for event in trace.document["traceEvents"]:
        kind = event.get("ph")
        if kind not in KEPT or _is_left_out(event):
            continue
        place = event.get("pid")
        if place not in pids:
            pids[place] = trace.rank * PROCESSES + 1 + len(pids) % (PROCESSES - 1)
            name = f"rank {trace.rank}: {labels.get(place, place)}"
            yield _metadata("process_name", pids[place], {"name": name})
            yield _metadata("process_sort_index", pids[place], {"sort_index": pids[place]})
        thread = place, event.get("tid")
        number = tids.setdefault(thread, len(tids) + 1)
        start_ns = round(float(event.get("ts", 0)) * 1e3) + base_ns
        time_ns = trace.clock.common(start_ns)
        found = {**event, "pid": pids[place], "tid": number, "ts": (time_ns - zero_ns) / 1e3}
        if "dur" in event:
            end_ns = trace.clock.common(start_ns + round(float(event["dur"]) * 1e3))
            found["dur"] = (end_ns - time_ns) / 1e3
        if isinstance(event.get("id"), int):
            found["id"] = event["id"] + trace.rank * FLOWS
        yield found


def _is_left_out(event: Event) -> bool:
    """Return whether Shoal writes an event itself: steps, calls (`gloo:send`, across others)."""
    name = str(event.get("name", ""))
    return (
        event.get("cat") in OWN
        or name == "[memory]"
        or (event.get("cat") == "user_annotation" and name.startswith(("gloo:", "nccl:")))
    )


def _process_labels(trace: RankTrace) -> dict[Any, str]:
    """Return the profiler's label of each process: "CPU", "GPU 0"."""
    return {
        event.get("pid"): str(event.get("args", {}).get("labels"))
        for event in trace.document["traceEvents"]
        if event.get("ph") == "M" and event.get("name") == "process_labels"
    }
