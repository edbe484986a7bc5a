"""Newest parts of a run's logs, each read with a limit of bytes: events, ranks, devices.

A run folder may be damaged, huge or hostile: a log that is no regular file counts as absent, a line
that is no record is left out, and no read is longer than its limit. Readers: `shoal serve`, sinks.

    EventCounts          counts by kind of event; each call reads only what the log has gained
    read_steps           rows of the newest steps
    read_rank_medians    wait and memory of each rank, medians of its newest steps
    read_devices         newest row of each device
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import BinaryIO

from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_lines_backward,
    parse_event,
    parse_object,
    parse_step,
)
from shoal.base.runlog.rank_records import (
    FOLDER,
    HEADER,
    PARTS,
    ROW,
    RankStep,
    decode_rank_steps,
)

CALL_BYTES = 1 << 24
"""Bytes of events that one call of `EventCounts.update` reads."""
RANK_BYTES = 1 << 20
"""Bytes of rank records that are read of a run, over all its nodes."""
LEAST_ROWS = 64
MOST_NODES = 1024
STEP_BYTES, DEVICE_BYTES = 1 << 20, 1 << 18
"""Bytes at the end of metrics.jsonl and devices.jsonl that are read."""
WINDOW_STEPS = 20
"""Newest steps of which waits are medians."""
DEVICE_AGE_S = 60.0
"""Seconds by which a host's devices may be older than those of the newest host."""


def open_log(path: Path) -> BinaryIO | None:
    """Open a log for reading; None if it is absent, unreadable or no regular file."""
    try:
        # A pipe in a log's place would keep the reader waiting for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    return None


class EventCounts:
    """Counts of a run's events by name, over the whole log.

    Attributes:
        counts: by name, of the events in `names`.

    Args:
        path: events.jsonl.
        names: kinds of events to count.
    """

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path = path
        self.counts = dict.fromkeys(names, 0)
        self._line = re.compile(rb"[^\n]*\n")
        self._mention = re.compile("|".join(map(re.escape, self.counts)).encode())
        self._offset, self._inode = 0, (0, 0)

    def update(self, most_bytes: int = CALL_BYTES) -> bool:
        """Count the new events; return whether all are counted.

        A log that was replaced or truncated is counted anew.

        Args:
            most_bytes: bytes to read; the rest remains for later calls.
        """
        file = open_log(self.path)
        if file is None:
            return True
        with file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._inode or found.st_size < self._offset:
                self.counts = dict.fromkeys(self.counts, 0)
                self._offset, self._inode = 0, (found.st_dev, found.st_ino)
            file.seek(self._offset)
            text = file.read(most_bytes)
        complete = text.rfind(b"\n") + 1
        if not complete and len(text) == most_bytes:
            complete = len(text)  # a line that is longer than a read is no event
        for line in self._line.findall(text[:complete]):
            event = parse_event(line) if self._mention.search(line) else None
            if event is not None and event["event"] in self.counts:
                self.counts[event["event"]] += 1
        self._offset += complete
        return len(text) < most_bytes


def read_steps(folder: Path) -> list[Record]:
    """Return the rows of the newest steps in metrics.jsonl, at most WINDOW_STEPS, oldest first."""
    file = open_log(folder / "metrics.jsonl")
    if file is None:
        return []
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - STEP_BYTES))
        tail = io.BytesIO(file.read(STEP_BYTES))
    steps = (step for _, line in iter_lines_backward(tail) if (step := parse_step(line)))
    return list(itertools.islice(steps, WINDOW_STEPS))[::-1]


@dataclass(frozen=True)
class RankMedians:
    """One rank's newest steps.

    Attributes:
        rank: its number.
        wait_s: median seconds of a step in which it waited for other ranks.
        busy_s: median seconds of a step in which it did not.
        peak_memory_bytes: the most that it had held.
    """

    rank: int
    wait_s: float
    busy_s: float
    peak_memory_bytes: int


def read_rank_medians(folder: Path, most_bytes: int = RANK_BYTES) -> list[RankMedians]:
    """Return the medians of each rank over the run's newest steps, by rank; [] without records.

    Args:
        folder: the run's folder.
        most_bytes: to read of all nodes' files, and at least 64 rows of each.
    """
    try:
        files = sorted((folder / FOLDER).glob("node-*.bin"))[:MOST_NODES]
    except OSError:
        return []
    rows: list[RankStep] = []
    for path in files:
        rows += _read_rank_tail(path, max(most_bytes // len(files), LEAST_ROWS * ROW.size))
    rows = [row for row in rows if all(0 <= part < math.inf for part in row.seconds)]
    newest = max((row.step for row in rows), default=0)
    by_rank: dict[int, list[RankStep]] = {}
    for row in rows:
        if row.step > newest - WINDOW_STEPS:
            by_rank.setdefault(row.rank, []).append(row)
    waiting = PARTS.index("waiting")
    return [
        RankMedians(
            rank,
            median(row.seconds[waiting] for row in own),
            median(math.fsum(row.seconds[:waiting]) for row in own),
            max(row.peak_memory_bytes for row in own),
        )
        for rank, own in sorted(by_rank.items())
    ]


def find_worst_rank(ranks: list[RankMedians]) -> tuple[int, float] | None:
    """Return the rank that the others wait for, and how much longer they wait than it does.

    Returns:
        (rank, seconds of a step): the rank that waits least, and the median of the other ranks'
        wait less its own. None for fewer than two ranks.

    >>> find_worst_rank([RankMedians(0, 0.25, 0.0, 0), RankMedians(1, 0.0, 0.25, 0)])
    (1, 0.25)
    """
    if len(ranks) < 2:
        return None
    worst = min(ranks, key=lambda one: (one.wait_s, one.rank))
    others_s = median(one.wait_s for one in ranks if one is not worst)
    return worst.rank, others_s - worst.wait_s


def _read_rank_tail(path: Path, most_bytes: int) -> list[RankStep]:
    """Return the last rows of a node's file."""
    file = open_log(path)
    if file is None:
        return []
    with file:
        header = file.read(HEADER.size)
        rows = (os.fstat(file.fileno()).st_size - HEADER.size) // ROW.size
        first = max(0, rows - most_bytes // ROW.size)
        file.seek(HEADER.size + first * ROW.size)
        return list(decode_rank_steps(header + file.read(most_bytes)))


def read_devices(folder: Path) -> list[Record]:
    """Return the newest row of each device of each host in devices.jsonl; [] without the file.

    Hosts whose newest row is more than a minute older than the newest of all are left out.
    """
    file = open_log(folder / "devices.jsonl")
    if file is None:
        return []
    with file:
        start = max(0, os.fstat(file.fileno()).st_size - DEVICE_BYTES)
        file.seek(start)
        lines = file.read(DEVICE_BYTES).split(b"\n")
    newest: dict[str, tuple[float, list[object]]] = {}
    for line in lines[bool(start) : -1]:
        row = parse_object(line) or {}
        time_s, devices = row.get("time_s"), row.get("devices")
        if is_number(time_s) and isinstance(devices, list):
            newest[str(row.get("host"))] = (time_s, devices)
    latest_s = max((time_s for time_s, _ in newest.values()), default=0.0)
    fresh = [rows for time_s, rows in newest.values() if time_s >= latest_s - DEVICE_AGE_S]
    return [device for rows in fresh for device in rows if isinstance(device, dict)]
