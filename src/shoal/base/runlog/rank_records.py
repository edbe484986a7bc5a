"""Binary records of each rank's steps: `rank_steps/node-N.bin`.

    bytes 0–63    b"SHOALRS1", then the node's number as 8 bytes, then zeros
    from byte 64  rows of 64 bytes:
        step               8 bytes, unsigned; of a rolled-up row its last one; 0: no row
        rank               4 bytes, unsigned
        steps              4 bytes, unsigned: 1, or how many a rolled-up row has the means of
        end_s              a double: when the step ended, in seconds since 1970
        peak_memory_bytes  8 bytes, unsigned: the most that the rank had held by then
        seconds            8 singles: of the parts of a step in which it did not wait for other
                           ranks (`PARTS`), then those in which it waited

All is little-endian. Rows are in the order of reading, which for each rank is that of steps; a step
that was not read is missing. A torn last row is ignored. Writer: launch/watch/step_records.py.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "rank_steps"
MAGIC = b"SHOALRS1"
HEADER, ROW = struct.Struct("<8sQ48x"), struct.Struct("<QIIdQ8f")
PARTS = ("other", "data", "passes", "sum", "update", "hooks", "backward", "waiting")
"""Parts of a step for which a row has seconds; each moment counts once.

other      a save, an evaluation, or another call outside the step
data       the loader; with batches that are not of `run.loader`, all from the end of the step
           before, the user's own loop code, too
passes     forward and backward passes; if `backward` is recorded, the forward passes alone
sum        sums of gradients and numbers over ranks, without waiting
update     the optimizer
hooks      callbacks of the step; with `run.loader`, the user's own loop code before the step
waiting    for other ranks, in any part
"""


@dataclass(frozen=True)
class RankStep:
    """A step of one rank, or the means of several steps.

    Attributes:
        step: step number; of several steps the last.
        rank: rank of the steps.
        steps: number of steps.
        end_s: end of the step, in seconds since 1970.
        peak_memory_bytes: peak memory of the rank until then.
        seconds: seconds by part, in the order of `PARTS`.
    """

    step: int
    rank: int
    steps: int
    end_s: float
    peak_memory_bytes: int
    seconds: tuple[float, ...]

    def encode(self) -> bytes:
        """Return the step as a row of 64 bytes."""
        return ROW.pack(
            self.step, self.rank, self.steps, self.end_s, self.peak_memory_bytes, *self.seconds
        )


def encode_header(node: int) -> bytes:
    """Return the first bytes of a node's file."""
    return HEADER.pack(MAGIC, node)


def decode_rank_steps(content: bytes) -> Iterator[RankStep]:
    """Yield the rows of a node's file, without a torn last one; none for another file."""
    if len(content) < HEADER.size or HEADER.unpack_from(content)[0] != MAGIC:
        return
    rows = memoryview(content)[HEADER.size :]
    whole = rows[: len(rows) // ROW.size * ROW.size]
    for step, rank, steps, end_s, peak, *seconds in ROW.iter_unpack(whole):
        if step:
            yield RankStep(step, rank, steps, end_s, peak, tuple(seconds))


def read_rank_steps(folder: str | Path) -> list[RankStep] | None:
    """Return a run's rank records, by step and rank; None if the run had no watchdog."""
    found: list[RankStep] = []
    files = sorted((Path(folder) / FOLDER).glob("node-*.bin"))
    for file in files:
        with contextlib.suppress(OSError):
            found += decode_rank_steps(file.read_bytes())
    return sorted(found, key=lambda one: (one.step, one.rank)) if files else None


def average_steps(rows: Iterable[RankStep], group: int) -> list[RankStep]:
    """Return the means over each rank's steps 1 to `group`, the next `group`, and so on.

    >>> ends = [RankStep(step, 0, 1, float(step), step, (0.5,) * 8) for step in (1, 2, 3, 4)]
    >>> [(one.step, one.steps, one.end_s, one.peak_memory_bytes) for one in average_steps(ends, 2)]
    [(2, 2, 2.0, 2), (4, 2, 4.0, 4)]
    """
    groups: dict[tuple[int, int], list[RankStep]] = {}
    for row in rows:
        groups.setdefault(((row.step - 1) // group, row.rank), []).append(row)
    return [_mean(groups[key]) for key in sorted(groups)]


def _mean(rows: Sequence[RankStep]) -> RankStep:
    last, count = rows[-1], sum(one.steps for one in rows)

    totals_s = [math.fsum(one.seconds[part] * one.steps for one in rows) for part in range(8)]
    peak = max(one.peak_memory_bytes for one in rows)
    means_s = tuple(total_s / count for total_s in totals_s)
    return RankStep(last.step, last.rank, count, last.end_s, peak, means_s)
