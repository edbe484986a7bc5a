"""A pipeline's actions as they ran in a sampled step, from pipeline.jsonl.

    {"step": 64, "timed_by": "host", "ranks": [
     {"began_s": 0.0, "actions": [["F0@0", 0.0, 0.0, 0.01], …]}, …]}

Each rank's seconds are by its host's clock. A message cannot arrive before it was sent: where the
clocks of two hosts say so, one rank's times are shifted by the least that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.base.plans.pipeline_actions import Action
from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.report.schedule_times import TimedAction

TEXT = re.compile(r"([FBIW])(\d{1,6})@(\d{1,6})", re.ASCII)
MOST_S = 1e6


@dataclass(frozen=True)
class RecordedStep:
    """The actions of all ranks of a pipeline in one step; `timed_by` is "host" or "device"."""

    step: int
    timed_by: str
    actions: list[TimedAction]


def read_recorded_step(records: Iterable[Record], ranks: int, most: int) -> RecordedStep | None:
    """Return the newest step of a pipeline's records; None without a readable one.

    Args:
        records: lines of pipeline.jsonl.
        ranks: of the pipeline; records of another number belong to an earlier layout.
        most: actions above which a step is left out.
    """
    found = None
    for record in records:
        rows, step = record.get("ranks"), record.get("step")
        if not isinstance(rows, list) or len(rows) != ranks or not is_number(step):
            continue
        each = [_read_rank(rank, row) for rank, row in enumerate(rows)]
        actions = [one for row in each for one in row]
        if all(each) and len(actions) <= most:
            by = "device" if record.get("timed_by") == "device" else "host"
            found = RecordedStep(int(step), by, _start_at_zero(align_clocks(actions, ranks)))
    return found


def _read_rank(rank: int, row: Any) -> list[TimedAction]:
    """Return the actions of one rank; [] if the record is damaged."""
    rows, began_s = (row.get("actions"), row.get("began_s")) if isinstance(row, dict) else (0, 0)
    if not isinstance(rows, list) or not _is_time(began_s):
        return []
    found = []
    for one in rows:
        if not isinstance(one, list) or len(one) != 4 or not all(map(_is_time, one[1:])):
            return []
        match = TEXT.fullmatch(one[0]) if isinstance(one[0], str) else None
        wait_s, start_s, end_s = one[1:]
        if match is None or not wait_s <= start_s <= end_s:
            return []
        action = Action(match[1], int(match[3]), int(match[2]))
        begin_s, done_s = began_s + start_s, began_s + end_s
        found.append(TimedAction(rank, action, begin_s, done_s, start_s - wait_s))
    return found


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < MOST_S


def align_clocks(actions: Sequence[TimedAction], ranks: int) -> list[TimedAction]:
    """Return actions with the times of ranks shifted so that no message arrives before it is sent.

    Bellman and Ford's rule over the least delay of each pair of ranks. Without a negative delay no
    time changes.

    >>> sent = TimedAction(0, Action("F", 0, 0), 0.0, 1.0)
    >>> early = TimedAction(1, Action("F", 1, 0), 0.5, 1.5)
    >>> [one.start_s for one in align_clocks([sent, early], 2)]
    [-0.5, 0.5]
    """
    delays = _least_delays(actions)
    shifts = [0.0] * ranks
    for _ in range(ranks):
        for (sender, receiver), delay_s in delays.items():
            shifts[sender] = min(shifts[sender], shifts[receiver] + delay_s)
    return [
        replace(one, start_s=one.start_s + shift, end_s=one.end_s + shift)
        for one in actions
        for shift in [shifts[one.rank]]
    ]


def _least_delays(actions: Sequence[TimedAction]) -> Mapping[tuple[int, int], float]:
    """Return (sender, receiver) → the least seconds from an action's end to the one it feeds."""
    made = {
        ("F" if one.action.kind == "F" else "B", one.action.stage, one.action.micro_batch): one
        for one in actions
        if one.action.kind != "W"
    }
    found: dict[tuple[int, int], float] = {}
    for (kind, stage, micro_batch), one in made.items():
        source = made.get((kind, stage - 1 if kind == "F" else stage + 1, micro_batch))
        if source is not None and source.rank != one.rank:
            key = source.rank, one.rank
            found[key] = min(found.get(key, MOST_S), one.start_s - source.end_s)
    return found


def _start_at_zero(actions: Sequence[TimedAction]) -> list[TimedAction]:
    first_s = min((one.start_s for one in actions), default=0.0)
    return [
        replace(one, start_s=one.start_s - first_s, end_s=one.end_s - first_s) for one in actions
    ]
