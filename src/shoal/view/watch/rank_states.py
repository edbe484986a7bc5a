"""State of each rank of a watched run.

It comes from the rank's records, ranks.json, devices.jsonl, the plan and the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_newest_lines,
    parse_object,
    read_object,
)
from shoal.base.runlog.rank_records import RankStep
from shoal.base.text.units import bytes_text
from shoal.view.watch.rank_tail import RankTail
from shoal.view.watch.styled_lines import clean_text
from shoal.view.watch.watch_state import RankState

RankDevice = tuple[str, str, tuple[str, int]]
"""(host, name of the device, its key in devices.jsonl)"""
DEVICES_FILE = "devices.jsonl"
LINES = 256
"""Lines that are read from the end; a run on more hosts than that shows some of them."""


def collect_rank_states(
    tail: RankTail,
    lateness_s: Mapping[int, float],
    devices: Mapping[int, RankDevice],
    samples: Mapping[tuple[str, int], str],
    plan: Record,
    session: Sequence[Record],
) -> list[RankState]:
    """Return the state of each rank that has a record, or that an event names.

    Args:
        tail: the newest records.
        lateness_s: by rank.
        devices: by rank, of ranks.json.
        samples: of devices.jsonl, by host and index.
        plan: plan.json.
        session: events of the newest start.
    """
    notes, firsts = _rank_notes(session, tail.rows), _first_steps(session)
    found = []
    for rank in sorted(tail.rows.keys() | notes.keys()):
        rows = tail.rows.get(rank)
        last = rows[-1] if rows else RankStep(0, rank, 1, 0.0, 0, (0.0,) * 8)
        unknown = (f"node {tail.nodes.get(rank, 0)}", "", ("", -1))
        host, device, key = devices.get(rank, unknown)
        found.append(
            RankState(
                str(rank),
                host,
                device,
                _role(rank, plan),
                last.step,
                mean_seconds(rows or (last,), firsts),
                lateness_s.get(rank, 0.0),
                last.peak_memory_bytes,
                notes.get(rank, ""),
                samples.get(key, ""),
            )
        )
    return found


def _first_steps(session: Sequence[Record]) -> frozenset[int]:
    """Return the first step after each start, which also has the seconds of what went before."""
    resumed = (one.get("step") for one in session if one["event"] == "resumed")
    return frozenset({1, *(int(step) + 1 for step in resumed if is_number(step))})


def mean_seconds(
    rows: Sequence[RankStep], firsts: frozenset[int] = frozenset({1})
) -> tuple[float, ...]:
    """Return the mean seconds of some steps by part, without those in `firsts` if there are others.

    >>> rows = [RankStep(n, 0, 1, 0.0, 0, (s,) * 8) for n, s in ((1, 9.0), (2, 1.0), (3, 3.0))]
    >>> mean_seconds(rows)[0]
    2.0
    """
    steady = [row for row in rows if row.step not in firsts] or rows
    count = len(steady)  # a plain sum: this runs for each of 1,024 ranks at each refresh
    return tuple(sum(own) / count for own in zip(*(r.seconds for r in steady), strict=True))


def read_rank_devices(path: Path) -> dict[int, RankDevice]:
    """Return the devices by rank, from ranks.json."""
    rows = read_object(path).get("ranks")
    found = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and is_number(row.get("rank")):
            device = row.get("device_name") or row.get("device") or ""
            index = str(row.get("device")).partition(":")[2]
            key = (str(row.get("host")), int(index) if index.isdecimal() else -1)
            host = clean_text(row.get("host") or "?")
            found[int(row["rank"])] = (host, clean_text(device), key)
    return found


def _role(rank: int, plan: Record) -> str:
    """Return what a rank does that others do not: a server, or a pipeline stage."""
    degrees = plan.get("layout")
    if not isinstance(degrees, dict):
        return ""
    sizes = {key: value for key, value in degrees.items() if isinstance(value, int) and value > 0}
    count = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        count *= sizes.get(axis, 1)
    servers, stages = sizes.get("servers", 0), sizes.get("pp", 1)
    if servers and rank >= count - servers:
        return "server"
    if stages > 1:
        return f"stage {rank * stages // count}" if rank < count else ""
    return "worker" if servers else ""


def _rank_notes(session: Sequence[Record], rows: dict[int, deque[RankStep]]) -> dict[int, str]:
    """Return dead and hung ranks, from the events of a session."""
    notes: dict[int, str] = {}
    for event in session:
        name, rank = event["event"], event.get("rank")
        if name == "restarting":
            notes.clear()
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            continue
        if name == "worker_died" and not _went_on(event, rows.get(rank)):
            notes[rank] = "dead"
        elif name == "worker_started":
            notes.pop(rank, None)
        elif name == "hang" and not _went_on(event, rows.get(rank)):
            notes.setdefault(rank, "hung")
    return notes


def _went_on(event: Record, rows: deque[RankStep] | None) -> bool:
    at_s = event.get("time_s")
    return bool(rows) and is_number(at_s) and rows is not None and rows[-1].end_s > at_s


def read_devices(folder: Path) -> dict[tuple[str, int], str]:
    """Return, by host and index of the device, its newest sample as a text."""
    found: dict[tuple[str, int], str] = {}
    for line in iter_newest_lines(folder / DEVICES_FILE, LINES):
        record = parse_object(line) or {}
        devices = record.get("devices")
        for device in devices if isinstance(devices, list) else ():
            if isinstance(device, dict) and is_number(device.get("index")):
                key = (str(record.get("host")), int(device["index"]))
                found.setdefault(key, describe_device(device))
    return found


def describe_device(device: Record) -> str:
    """Return a sample as a text; what is unknown is left out.

    >>> describe_device({"utilisation": 0.97, "memory_used_bytes": 2**30, "temperature_c": 61.0})
    '97% 1.0 GiB 61 °C'
    """
    forms = {
        "utilisation": lambda value: f"{value:.0%}",
        "memory_used_bytes": bytes_text,
        "power_w": lambda value: f"{value:.0f} W",
        "temperature_c": lambda value: f"{value:.0f} °C",
    }
    known = ((form, device.get(key)) for key, form in forms.items())
    return " ".join(form(value) for form, value in known if is_number(value))
