"""Seconds of a run's newest steps by rank and part, as one array; the verdict is computed from it.

    rank_steps/node-N.bin   each rank's seconds by part and of waiting (base/runlog/rank_records.py)
    metrics.jsonl           rank 0's step, data and exposed communication, if there are no records

Only the ends of the files are read, and at most `MOST_CELLS` pairs of step and rank are kept. So a
run of 10⁶ steps, or of 1,024 ranks, costs no more than a short one.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.runlog.rank_records import FOLDER, HEADER, MAGIC, PARTS, ROW
from shoal.report.order_statistics import distinct

if TYPE_CHECKING:  # at run time it is loaded where it is used
    import numpy as np

MOST_STEPS, MOST_CELLS = 2_000, 400_000
OTHER, DATA, PASSES, SUM, UPDATE, HOOKS, BACKWARD, WAITING = range(len(PARTS))
LONGEST_S = 1e6
"""A longer part of a step is a damaged row."""
ROW_FIELDS = [
    ("step", "<u8"), ("rank", "<u4"), ("steps", "<u4"), ("end_s", "<f8"),
    ("peak_memory_bytes", "<u8"), ("seconds", "<f4", (len(PARTS),)),
]  # fmt: skip


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steps by rank and part.

    Attributes:
        steps: numbers of the steps, ascending.
        ranks: the ranks, ascending.
        seconds: [steps, ranks, parts], parts as in `PARTS`.
        end_s: [steps, ranks], ends of the steps in seconds since 1970; NaN if unknown.
        by_rank: ranks recorded their steps; False: only rank 0's line of each step is known.
    """

    steps: np.ndarray[Any, Any]
    ranks: tuple[int, ...]
    seconds: np.ndarray[Any, Any]
    end_s: np.ndarray[Any, Any]
    by_rank: bool

    def select_steps(self, mask: np.ndarray[Any, Any]) -> StepSeconds:
        """Return the steps for which a mask is true."""
        return StepSeconds(
            self.steps[mask], self.ranks, self.seconds[mask], self.end_s[mask], self.by_rank
        )


def read_step_seconds(folder: Path, rows: Sequence[Record]) -> StepSeconds | None:
    """Return the times of a run's newest steps; None if nothing of it can be read.

    Args:
        folder: the run's.
        rows: newest lines of metrics.jsonl, for runs without rank records.
    """
    return _read_rank_records(folder) or _times_of_rows(rows)


def _read_rank_records(folder: Path) -> StepSeconds | None:
    import numpy as np

    try:
        files = sorted((folder / FOLDER).glob("node-*.bin"))
    except OSError:
        return None
    found = [rows for file in files if len(rows := _read_last_rows(file, len(files)))]
    if not found:
        return None
    rows = np.concatenate(found)
    newest = int(rows["step"].max())
    ranks = distinct(rows["rank"][rows["step"] + 64 > newest])
    most = min(MOST_STEPS, max(64, MOST_CELLS // len(ranks)))
    rows = rows[(rows["step"] + most > newest) & np.isin(rows["rank"], ranks)]
    steps = distinct(rows["step"])
    seconds = np.full((len(steps), len(ranks), len(PARTS)), np.nan, np.float32)
    end_s = np.full((len(steps), len(ranks)), np.nan)
    at = np.searchsorted(steps, rows["step"]), np.searchsorted(ranks, rows["rank"])
    seconds[at], end_s[at] = rows["seconds"], rows["end_s"]
    whole: Any = ~np.isnan(seconds).any(axis=(1, 2))
    if not whole.any():
        return None
    numbers = tuple(int(one) for one in ranks)
    return StepSeconds(steps.astype(np.int64), numbers, seconds, end_s, True).select_steps(whole)


def _read_last_rows(file: Path, files: int) -> np.ndarray[Any, Any]:
    """Return the last readable rows of single steps in a node's file."""
    import numpy as np

    row = np.dtype(ROW_FIELDS)
    none = np.empty(0, row)
    try:
        with file.open("rb") as stream:
            whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # unreadable, or empty
        return none
    with whole:
        if whole[: len(MAGIC)] != MAGIC:
            return none
        count = (len(whole) - HEADER.size) // ROW.size
        # Twice the cells: steps that were made again are in the file twice for a while.
        first = max(0, count - max(2 * MOST_CELLS // files, 4 * MOST_STEPS))
        raw = whole[HEADER.size + first * ROW.size : HEADER.size + count * ROW.size]
    rows = np.frombuffer(raw, row)
    with np.errstate(invalid="ignore"):
        sound = ((rows["seconds"] >= 0) & (rows["seconds"] < LONGEST_S)).all(axis=1)
    return rows[sound & (rows["step"] > 0) & (rows["step"] < 1 << 62) & (rows["steps"] == 1)]


def _times_of_rows(rows: Sequence[Record]) -> StepSeconds | None:
    """Return rank 0's times from lines of metrics.jsonl: data, exposed communication, the rest."""
    import numpy as np

    found = {}
    for row in rows:
        step_s, data_s = row.get("step_s"), row.get("data_wait_s")
        wait_s = row.get("comm_exposed_s") if row.get("comm_bytes") else 0.0
        if is_number(step_s) and 0 < step_s < LONGEST_S and abs(row["step"]) < 1 << 62:
            data_s = min(max(0.0, data_s), step_s) if is_number(data_s) else 0.0
            wait_s = min(max(0.0, wait_s), step_s - data_s) if is_number(wait_s) else 0.0
            parts = [0.0] * len(PARTS)
            loop_s, rest_s = row.get("loop_s"), step_s - data_s - wait_s
            parts[HOOKS] = min(max(0.0, loop_s), rest_s) if is_number(loop_s) else 0.0
            parts[DATA], parts[WAITING], parts[PASSES] = data_s, wait_s, rest_s - parts[HOOKS]
            found[int(row["step"])] = parts
    if not found:
        return None
    steps = np.array(sorted(found))
    seconds = np.array([[found[int(step)]] for step in steps], np.float32)
    return StepSeconds(steps, (0,), seconds, np.full((len(steps), 1), np.nan), False)
