"""The newest steps of each rank, read from the ends of `rank_steps/node-N.bin`.

A reader remembers how far it read each file and reads new rows alone, at most ROWS a call over all
files; of a file that was replaced or truncated it reads the end again. Rows may be damaged: a time
that is not finite counts as 0, a rank above MOST_RANKS is left out.
"""

from __future__ import annotations

import contextlib
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

from shoal.base.runlog.rank_records import FOLDER, HEADER, MAGIC, PARTS, ROW, RankStep
from shoal.view.progress import WINDOW_STEPS

ROWS = 2_048
WINDOW = WINDOW_STEPS
"""Newest steps of a rank that count for its time and its lateness, as in all other figures."""
FEW_RANKS = 32
"""Of more ranks the median of all stands for that of the others; it is at most one rank off."""
MOST_RANKS = 1 << 17
MOST_FILES = 2_048
LONGEST_S = 1e7
WAITING = PARTS.index("waiting")


class RankTail:
    """Reader of a run's rank records; call `read` again and again.

    Attributes:
        rows: rank → its newest steps, oldest first.
        nodes: rank → the number of its node.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.rows: dict[int, deque[RankStep]] = {}
        self.nodes: dict[int, int] = {}
        self._offsets: dict[Path, tuple[int, int]] = {}  # file → (inode, bytes read)

    def read(self) -> bool:
        """Read new rows; return whether there were any."""
        files = sorted(self.folder.glob("node-*.bin"))[:MOST_FILES]
        for gone in set(self._offsets) - set(files):
            del self._offsets[gone]
        share = max(64, ROWS // max(1, len(files)))
        found = False
        for path in files:
            with contextlib.suppress(OSError):
                found = self._read_file(path, share * ROW.size) or found
        return found

    def peaks(self) -> list[float]:
        """Return the peak memory of each rank, in bytes."""
        return [float(own[-1].peak_memory_bytes) for own in self.rows.values() if own]

    def _read_file(self, path: Path, most_bytes: int) -> bool:
        status = path.stat()
        inode, offset = self._offsets.get(path, (0, 0))
        end = status.st_size - (status.st_size - HEADER.size) % ROW.size
        if inode == status.st_ino and end == offset:
            return False
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size or HEADER.unpack(head)[0] != MAGIC:
                return False
            if inode != status.st_ino or end < offset:
                offset = HEADER.size
            first = max(offset, end - most_bytes)
            file.seek(first)
            content = file.read(max(0, end - first))
        self._offsets[path] = (status.st_ino, end)
        node = HEADER.unpack(head)[1]
        for row in ROW.iter_unpack(content[: len(content) // ROW.size * ROW.size]):
            self._add(row, node)
        return bool(content)

    def _add(self, row: tuple[float, ...], node: int) -> None:
        step, rank, steps, end_s, peak, *seconds = row
        if not step or rank >= MOST_RANKS:
            return
        own = self.rows.setdefault(int(rank), deque(maxlen=WINDOW))
        while own and own[-1].step >= step:  # a resumed run repeats steps
            own.pop()
        clean_s = tuple(abs(one) if abs(one) < LONGEST_S else 0.0 for one in seconds)
        own.append(RankStep(int(step), int(rank), int(steps), end_s, int(peak), clean_s))
        self.nodes[int(rank)] = node


def compute_lateness_s(rows: dict[int, deque[RankStep]]) -> dict[int, float]:
    """Return, by rank, how much less it waits than the median of the others; at least 0.

    That is how long the others wait for this rank in a usual step: the median over the newest
    steps that several ranks have made.

    >>> def wait(rank, seconds):
    ...     return deque([RankStep(5, rank, 1, 0.0, 0, (0.0,) * 7 + (seconds,))])
    >>> compute_lateness_s({0: wait(0, 0.3), 1: wait(1, 0.0), 2: wait(2, 0.25)})
    {0: 0.0, 1: 0.275, 2: 0.0}
    """
    by_step: dict[int, list[RankStep]] = defaultdict(list)
    for own in rows.values():
        for one in own:
            by_step[one.step].append(one)
    late: dict[int, list[float]] = {rank: [] for rank in rows}
    for step_rows in by_step.values():
        if len(step_rows) < 2:
            continue
        waits_s = sorted(one.seconds[WAITING] for one in step_rows)
        median_s = statistics.median(waits_s) if len(waits_s) > FEW_RANKS else None
        for one in step_rows:
            wait_s = one.seconds[WAITING]
            others_s = _median_of_others(waits_s, wait_s) if median_s is None else median_s
            late[one.rank].append(others_s - wait_s)
    return {
        rank: max(0.0, statistics.median(values)) if values else 0.0
        for rank, values in late.items()
    }


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of a sorted list without one occurrence of `own`."""
    gone, count = bisect_left(ordered, own), len(ordered) - 1

    def at(place: int) -> float:
        return ordered[place + (place >= gone)]

    if count % 2:
        return at(count // 2)
    return (at(count // 2 - 1) + at(count // 2)) / 2
