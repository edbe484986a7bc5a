"""Seconds of each rank's steps from `rank_steps/`, as means by rank and lateness by step and rank.

    lateness of a rank in a step = median of the other ranks' waits − its own wait, at least 0

So it is the time by which half of the others wait longer for other ranks than this one does: of a
rank that makes all wait, its delay. Files are read in blocks: 1,024 ranks of 10⁴ steps are 655 MB,
of which a matrix of waits (41 MB) is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.rank_records import FOLDER, HEADER, MAGIC, PARTS, ROW
from shoal.report.order_statistics import distinct, median
from shoal.report.verdict.step_seconds import LONGEST_S, ROW_FIELDS, WAITING

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BLOCK_ROWS = 1 << 17
MOST_RANKS, MOST_CELLS = 1 << 16, 1 << 25
"""Largest rank number · pairs of step and rank that are held; of more, the newest steps."""
MOST_COLUMNS = 640
"""Columns of a heat map."""
SHOWN_MOMENTS = 24


@dataclass(frozen=True)
class LateMoment:
    """One step of one rank for which the others waited long.

    Attributes:
        step, rank: the moment; of a row of means its last step.
        late_s: lateness.
        part: name of the part with the largest excess over the median of the other ranks.
        part_s, usual_s: seconds in that part, and the median of the others.
    """

    step: int
    rank: int
    late_s: float
    part: str = ""
    part_s: float = 0.0
    usual_s: float = 0.0


@dataclass(frozen=True)
class RankTimes:
    """Times of a run's steps by rank.

    Attributes:
        ranks: rank numbers, ascending.
        first_step, last_step: of the steps that all ranks recorded.
        steps: number of them (rows of means count once).
        mean_s: [ranks, parts] mean seconds of a step, parts as in `PARTS`.
        late_s, worst_s: [ranks] mean and largest lateness.
        columns: last step of each column of the map.
        late_map: [ranks, columns] largest lateness within each column.
        moments: the largest lateness of all, each rank at most a few times.
    """

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    steps: int
    mean_s: Array
    late_s: Array
    worst_s: Array
    columns: tuple[int, ...]
    late_map: Array
    moments: tuple[LateMoment, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, over ranks."""
        return float(self.mean_s.sum(axis=1).mean())


def read_rank_times(folder: Path, last_step: int | None = None) -> RankTimes | None:
    """Return a run's times by rank; None if no watchdog recorded any.

    Args:
        folder: the run's.
        last_step: rows of later steps are left out, as those that a resume makes again.
    """
    files = sorted((folder / FOLDER).glob("node-*.bin"))
    blocks, steps, ranks = _find_blocks(files)
    if last_step is not None:
        steps = steps[steps <= last_step]
    if not len(steps):
        return None
    steps = steps[-max(1, MOST_CELLS // len(ranks)) :]
    sums = _sum_blocks(blocks, steps, ranks)
    if not _is_sound(sums):
        sums = _sum_blocks(blocks, steps, ranks, strict=True)
    whole = (sums.waits == sums.waits).all(axis=1)
    steps, waits = steps[whole], (sums.waits if whole.all() else sums.waits[whole])
    if not len(steps):
        return None
    (late_s, worst_s, columns, late_map), moments = _reduce_lateness(waits, steps, ranks)
    return RankTimes(
        tuple(int(one) for one in ranks),
        int(steps[0]),
        int(steps[-1]),
        len(steps),
        (sums.totals / sums.counts.clip(1)).T,
        late_s,
        worst_s,
        columns,
        late_map,
        _explain_moments(blocks, moments),
    )


@dataclass(frozen=True)
class _Block:
    """Rows of a file that are read together, with their first and last step."""

    file: Path
    offset: int
    count: int
    first: int = 0
    last: int = 0
    clean: bool = False

    def read(self) -> Array:
        """Return the rows that name a step and a rank."""
        import numpy as np

        row = np.dtype(ROW_FIELDS)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                block = stream.read(self.count * ROW.size)
        except OSError:
            return np.empty(0, row)
        rows = np.frombuffer(block, row, len(block) // ROW.size)
        if self.clean and len(rows) == self.count:
            return rows
        named = (rows["step"] - 1 < (1 << 53)) & (rows["rank"] < MOST_RANKS) & (rows["steps"] > 0)
        return rows if named.all() else rows[named]


@dataclass(frozen=True)
class _Sums:
    """Sums over all rows: [steps, ranks] waits, [parts, ranks] seconds, [ranks] steps."""

    waits: Array
    totals: Array
    counts: Array


def _find_blocks(files: Sequence[Path]) -> tuple[list[_Block], Array, Array]:
    """Return the blocks of all files, and the numbers of all steps and ranks, ascending."""
    import numpy as np

    found, seen, blocks = [np.empty(0, np.uint64)], np.zeros(MOST_RANKS, bool), []
    for file in files:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                size *= stream.read(len(MAGIC)) == MAGIC
        except OSError:
            continue
        # Blocks of whole steps, if ranks come in turn: `_sum_blocks` need not look them up.
        ranks = max(1, len(distinct(_Block(file, HEADER.size, BLOCK_ROWS).read()["rank"])))
        count = max(1, BLOCK_ROWS // ranks) * ranks
        for offset in range(HEADER.size, size - ROW.size + 1, count * ROW.size):
            rows = _Block(file, offset, count).read()
            if len(rows):
                seen[rows["rank"]] = True
                steps = distinct(rows["step"][_changes(rows["step"])])
                ends, whole = (int(steps[0]), int(steps[-1])), len(rows) == count
                found.append(steps)
                blocks.append(_Block(file, offset, count, *ends, clean=whole))
    return blocks, distinct(np.concatenate(found)), np.flatnonzero(seen)


def _sum_blocks(
    blocks: Sequence[_Block], steps: Array, ranks: Array, *, strict: bool = False
) -> _Sums:
    """Return the sums of all rows of `steps`.

    Args:
        strict: leave out rows with seconds that are no time; slower.
    """
    import numpy as np

    waits = np.full((len(steps), len(ranks)), np.nan, np.float32)
    totals, counts = np.zeros((len(PARTS), len(ranks))), np.zeros(len(ranks))
    for block in blocks:
        if block.last < steps[0] or block.first > steps[-1]:
            continue
        rows = block.read()
        if block.first < steps[0] or block.last > steps[-1]:
            rows = rows[(rows["step"] >= steps[0]) & (rows["step"] <= steps[-1])]
        if strict:
            with np.errstate(invalid="ignore"):
                rows = rows[(np.abs(rows["seconds"]) < LONGEST_S).all(axis=1)]
        regular = _count_regular(rows, ranks)
        if regular:  # rank after rank, step after step: no rank has to be looked up
            table = rows[:regular].reshape(-1, len(ranks))
            waits[np.searchsorted(steps, table["step"][:, 0])] = table["seconds"][..., WAITING]
            totals += table["seconds"].sum(axis=0).T  # of some hundred steps: singles are enough
            counts += len(table)
        rest = rows[regular:]
        rank = np.searchsorted(ranks, rest["rank"])
        waits[_indices(rest["step"], steps), rank] = rest["seconds"][:, WAITING]
        weights = rest["steps"].astype(np.float64)
        counts += np.bincount(rank, weights, len(ranks))
        for part in range(len(PARTS) if len(rest) else 0):
            totals[part] += np.bincount(rank, rest["seconds"][:, part] * weights, len(ranks))
    return _Sums(waits, totals, counts)


def _count_regular(rows: Array, ranks: Array) -> int:
    """Return how many rows at the start are whole steps, of all ranks in turn; or 0."""
    count = len(rows) // len(ranks) * len(ranks)
    table = rows[:count].reshape(-1, len(ranks))
    regular = (table["rank"] == ranks).all() and (table["steps"] == 1).all()
    return count if regular and (table["step"] == table["step"][:, :1]).all() else 0


def _is_sound(sums: _Sums) -> bool:
    """Return whether no row had seconds that are no time, as far as sums show it."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        return bool((np.abs(sums.totals) <= LONGEST_S * sums.counts).all())


def _changes(values: Array) -> Array:
    """Return a mask of the values that differ from the one before: steps come in runs."""
    import numpy as np

    mask = np.ones(len(values), bool)
    mask[1:] = values[1:] != values[:-1]
    return mask


def _indices(values: Array, known: Array) -> Array:
    """Return the index of each value in `known`, looked up once for each run of equal values."""
    import numpy as np

    mask = _changes(values)
    return np.searchsorted(known, values[mask])[np.cumsum(mask) - 1]


def lateness(waits: Array) -> Array:
    """Return the lateness of each rank in each step.

    Args:
        waits: [steps, ranks] seconds in which each rank waited for others.

    >>> import numpy as np
    >>> lateness(np.array([[0.25, 0.25, 0.0, 0.5]])).tolist()
    [[0.0, 0.0, 0.25, 0.0]]
    """
    import numpy as np

    count = waits.shape[1]
    if count < 2:
        return np.zeros_like(waits)
    # The median of the others: of all sorted waits, those in the middle without one's own.
    low, high = (count - 2) // 2, (count - 1) // 2
    places = sorted({low, low + 1, high, min(high + 1, count - 1)})
    ordered = np.partition(waits, places, axis=1)

    def other(place: int) -> Array:
        here, after = ordered[:, place, None], ordered[:, min(place + 1, count - 1), None]
        return np.where(waits <= here, after, here)

    return np.maximum((other(low) + other(high)) / 2 - waits, 0.0)


def _reduce_lateness(
    waits: Array, steps: Array, ranks: Array
) -> tuple[tuple[Array, Array, tuple[int, ...], Array], list[LateMoment]]:
    """Return ((mean, worst, columns, map), moments), a group of steps at a time."""
    import numpy as np

    count = min(MOST_COLUMNS, len(steps))
    edges = [len(steps) * number // count for number in range(count + 1)]
    total, worst = np.zeros(len(ranks)), np.zeros(len(ranks), np.float32)
    late_map = np.zeros((count, len(ranks)), np.float32)
    moments: list[LateMoment] = []
    for column, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
        late = lateness(waits[first:end])
        total += late.sum(axis=0, dtype=np.float64)
        late_map[column] = late.max(axis=0)
        worst = np.maximum(worst, late_map[column])
        most = min(SHOWN_MOMENTS, late.size)
        for place in np.argpartition(late, late.size - most, axis=None)[-most:]:
            step, rank = divmod(int(place), len(ranks))
            late_s = float(late[step, rank])
            if late_s > 0:
                moments.append(LateMoment(int(steps[first + step]), int(ranks[rank]), late_s))
        moments = sorted(moments, key=lambda one: -one.late_s)[:SHOWN_MOMENTS]
    columns = tuple(int(steps[end - 1]) for end in edges[1:])
    return (total / len(steps), worst, columns, late_map.T), moments


def _explain_moments(
    blocks: Sequence[_Block], moments: Sequence[LateMoment]
) -> tuple[LateMoment, ...]:
    """Return moments with the part of the step in which the rank was late."""
    import numpy as np

    wanted = sorted({one.step for one in moments})
    found: dict[int, dict[int, Array]] = {step: {} for step in wanted}
    for block in blocks:
        here = [step for step in wanted if block.first <= step <= block.last]
        if not here:
            continue
        rows = block.read()
        for row in rows[np.isin(rows["step"], here)]:
            found[int(row["step"])][int(row["rank"])] = np.abs(row["seconds"])
    explained = []
    for one in moments:
        by_rank = found[one.step]
        own = by_rank[one.rank]
        usual = median([s for rank, s in by_rank.items() if rank != one.rank], axis=0)
        excess = own - usual
        excess[WAITING] = -1.0
        part = int(excess.argmax())
        seconds = float(own[part]), float(usual[part])
        explained.append(LateMoment(one.step, one.rank, one.late_s, PARTS[part], *seconds))
    return tuple(explained)
