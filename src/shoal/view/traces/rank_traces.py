"""Trace files of the ranks of a run, on one clock.

Each rank's file has the times at which a few collectives ended, before the first traced step and
after the last one. A collective ends on all ranks at about the same moment, so the median of the
differences from rank 0's times is that of the clocks; their drift counts if it exceeds the spread.
Then the steps' own collectives bound it: none ends on a rank before the other one has begun it.
Ranks of one machine read one clock, and nothing is estimated: on a busy machine the ends of a
collective lie milliseconds apart.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.traced_steps import (
    TOGETHER,
    Flight,
    TracedRange,
    call_key,
    decode_rows,
)

FILE = re.compile(r"steps-([0-9]+)-([0-9]+)-rank-([0-9]+)\.json")


@dataclass
class RankTrace:
    """Trace of one rank, with times of the common clock.

    Attributes:
        rank: its number.
        steps: first and last traced step.
        document: the profiler's trace, with its own times.
        ranges, flights: as recorded, but on the common clock.
        clock: this rank's clock.
    """

    rank: int
    steps: tuple[int, int]
    document: dict[str, Any]
    ranges: list[TracedRange]
    flights: list[Flight]
    clock: RankClock


@dataclass(frozen=True)
class RankClock:
    """Difference of a rank's clock from rank 0's, linear between two moments.

    Attributes:
        moments: of the rank's clock, in ns.
        differences: to add there.
        error_ns: median distance of a single call from the difference.

    >>> RankClock((0, 100), (10, 20), 0).common(50)
    65
    """

    moments: tuple[int, int] = (0, 0)
    differences: tuple[int, int] = (0, 0)
    error_ns: int = 0

    def common(self, time_ns: int) -> int:
        """Return a time of this rank on the common clock."""
        (begin, end), (first, last) = self.moments, self.differences
        if first == last:
            return time_ns + first
        return time_ns + round(first + (last - first) * (time_ns - begin) / (end - begin))

    def shift(self, more_ns: int) -> RankClock:
        """Return a clock whose common times are later."""
        first, last = self.differences
        return RankClock(self.moments, (first + more_ns, last + more_ns), self.error_ns)


def compare_clocks(own: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> RankClock:
    """Return a rank's clock beside rank 0's, from the ends of the same collectives.

    Args:
        own: of the rank, as `clocks` of its file.
        other: of rank 0.

    >>> compare_clocks([[0, 10, 20], [100, 110, 120]], [[5, 15, 25], [205, 215, 225]]).differences
    (5, 105)
    """
    found, gaps = [], []
    for mine, theirs in zip(own, other, strict=False):
        here = [b - a for a, b in zip(mine, theirs, strict=False)]
        if here:
            found.append((mine[len(mine) // 2], round(median(here)), here))
            gaps += here
    if not gaps:
        return RankClock()
    (begin, first, _), (end, last, _) = found[0], found[-1]
    error = round(median(abs(gap - middle) for _, middle, here in found for gap in here))
    if abs(last - first) <= 4 * error or end <= begin:
        first = last = round(median(gaps))
    return RankClock((begin, end), (first, last), error)


def bound_clock(clock: RankClock, own: Sequence[Flight], other: Sequence[Flight]) -> RankClock:
    """Return a clock by which no collective ends before both of two ranks have begun it.

    Args:
        clock: of the first rank.
        own, other: calls of the first rank and of rank 0, by their own clocks.
    """
    calls = {call_key(one): one for one in other if one.name in TOGETHER}
    least, most = -math.inf, math.inf
    for one in own:
        if (there := calls.get(call_key(one))) is not None:
            least = max(least, there.start_ns - clock.common(one.end_ns))
            most = min(most, there.end_ns - clock.common(one.start_ns))
    if least > most:  # no clock satisfies these calls
        return clock
    return clock.shift(round(min(max(0.0, least), most)))


def read_rank_traces(run: Path) -> list[RankTrace]:
    """Read the newest trace of a run of which every rank's file is there, by rank.

    Raises:
        ConfigError: there is none, or a file is missing or damaged.
    """
    names: dict[tuple[int, int], dict[int, Path]] = {}
    for path in sorted((run / "traces").glob("steps-*.json")):
        if match := FILE.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            names.setdefault((first, last), {})[rank] = path
    if not names:
        raise ConfigError(
            f"{run}: has no trace; try: shoal train --resume {run} train.trace=FIRST:LAST, two "
            f"steps that are still to come"
        )
    steps = max(names, key=lambda one: max(path.stat().st_mtime for path in names[one].values()))
    documents = {rank: _read_document(path) for rank, path in sorted(names[steps].items())}
    wanted = documents[min(documents)]["shoal"]["ranks"]
    if missing := sorted(set(range(wanted)) - set(documents)):
        raise ConfigError(
            f"{run}/traces: rank {missing[0]}'s trace of the steps {steps[0]} to {steps[1]} is not "
            f"here; try: copy it from its node"
        )
    return [_make_trace(rank, steps, one, documents[0]) for rank, one in documents.items()]


def _read_document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = found["shoal"]
        decode_rows(known)
        int(known["ranks"]), list(known["clocks"]), list(found["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise ConfigError(
            f"{path}: is no trace with the parts of a step ({type(damage).__name__}: {damage}); "
            f"try: train.trace with this version"
        ) from damage
    return found


def _share_clock(own: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two ranks ran on one machine: they read the same clock."""
    return bool(own.get("clock")) and own.get("clock") == other.get("clock")


def _make_trace(
    rank: int, steps: tuple[int, int], document: dict[str, Any], first: dict[str, Any]
) -> RankTrace:
    clock = RankClock()
    ranges, flights = decode_rows(document["shoal"])
    if rank and not _share_clock(document["shoal"], first["shoal"]):
        clock = compare_clocks(document["shoal"]["clocks"], first["shoal"]["clocks"])
        clock = bound_clock(clock, flights, decode_rows(first["shoal"])[1])
    timed: list[TracedRange | Flight] = [*ranges, *flights]
    for one in timed:
        one.start_ns, one.end_ns = clock.common(one.start_ns), clock.common(one.end_ns)
    return RankTrace(rank, steps, document, ranges, flights, clock)
