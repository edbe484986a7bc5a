"""Folder of a replay: a copy of what a run needs to repeat its steps from an earlier checkpoint.

    run.toml, plan.json   of the run
    checkpoints/step-K    hard links to the files of the nearest checkpoint before the step
    replay.json           the steps to repeat and to record, for the worker processes

The run's own folder is only read: links are made of complete files, which nothing writes again.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import (
    Record,
    iter_lines_backward,
    parse_object,
    parse_step,
    read_object,
)
from shoal.checkpoint.format.listing import CheckpointEntry, list_checkpoints

REQUEST, RECORDED = "replay.json", "step_record.json"


@dataclass(frozen=True)
class ReplayRequest:
    """Steps that the processes of a replay repeat.

    Attributes:
        last_step: the last step that is taken.
        record_from: the first step whose tensors are recorded; 0: none is.
        script, words, cwd: of a loop of the user's own: its copy, arguments, working folder there.
        home: the working folder in which the user started the command.
        run: the run's own folder.
        layout: replaces the script's; "": the script's.
        statistics: `train.statistics` of the replay; 0: none are recorded.
        nudge: share of each weight by which it is moved before the first step; 0: none is.
    """

    last_step: int
    record_from: int = 0
    script: str = ""
    words: tuple[str, ...] = ()
    cwd: str = ""
    home: str = ""
    run: str = ""
    layout: str = ""
    statistics: int = 0
    nudge: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the request into a replay's folder."""
        write_atomically(folder / REQUEST, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> ReplayRequest:
        """Read the request of a replay's folder."""
        found = read_object(folder / REQUEST)
        return ReplayRequest(**{**found, "words": tuple(found["words"])})


def find_start(run: Path, step: int) -> CheckpointEntry | None:
    """Return the newest checkpoint before a step, among the run's own and its tags; None: none."""
    roots = [run / "checkpoints", *sorted(run.glob("tags/*/checkpoints"))]
    found = [one for root in roots for one in list_checkpoints(root) if one.step < step]
    return max(found, key=lambda one: one.step) if found else None


def fill_folder(run: Path, folder: Path, start: CheckpointEntry | None) -> None:
    """Copy what a replay needs from a run into an empty folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name in ("run.toml", "plan.json"):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    if start is not None:
        target = folder / "checkpoints" / start.path.name
        target.mkdir(parents=True)
        for path in start.path.iterdir():
            if path.is_file():
                _link_or_copy(path, target / path.name)


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(path, target)


def read_rows(folder: Path, first: int, last: int) -> dict[int, Record]:
    """Return the rows of metrics.jsonl of some steps; of a step that ran twice, the last.

    Args:
        first, last: the steps, both included.
    """
    rows: dict[int, Record] = {}
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            for _, line in iter_lines_backward(file):
                row = parse_step(line)
                if row is None or row["step"] > last:
                    continue
                if row["step"] < first:
                    break
                rows.setdefault(row["step"], row)
    except OSError:
        return {}
    return dict(sorted(rows.items()))


def read_statistics(folder: Path, step: int) -> Record:
    """Return the line of statistics.jsonl of a step, its last one; {} without any."""
    try:
        with open(folder / "statistics.jsonl", "rb") as file:
            lines = (parse_object(line) for _, line in iter_lines_backward(file))
            return next((one for one in lines if one and one.get("step") == step), {})
    except OSError:
        return {}


def read_last_step(folder: Path) -> int:
    """Return the newest step of metrics.jsonl; 0 without any."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            rows = (parse_step(line) for _, line in iter_lines_backward(file))
            return next((row["step"] for row in rows if row is not None), 0)
    except OSError:
        return 0
