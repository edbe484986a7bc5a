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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_newest_lines,
    parse_event,
    parse_step,
    read_newest_steps,
    read_object,
)
from shoal.checkpoint.format.listing import CheckpointEntry, list_checkpoints

REQUEST, RECORDED = "replay.json", "step_record.json"
TRIES = 5
"""Checkpoints that are tried while the run deletes old ones."""


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
        rewinds: returns to a checkpoint that the run made meanwhile, (from step, to step) each.
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
    rewinds: tuple[tuple[int, int], ...] = ()

    def write(self, folder: Path) -> None:
        """Write the request into a replay's folder."""
        write_atomically(folder / REQUEST, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> ReplayRequest:
        """Read the request of a replay's folder."""
        found = read_object(folder / REQUEST)
        pairs = tuple((int(start), int(to)) for start, to in found["rewinds"])
        return ReplayRequest(**{**found, "words": tuple(found["words"]), "rewinds": pairs})


def read_rewinds(run: Path, start: int) -> tuple[tuple[int, int], ...]:
    """Return the returns to a checkpoint that a run made after it had saved step `start`.

    Args:
        start: step of the checkpoint with which a replay begins; 0: the run's first step.
    """
    found: list[tuple[int, int]] = []
    for line in iter_newest_lines(run / "events.jsonl"):
        event = parse_event(line) or {}
        step, name = event.get("step"), event.get("event")
        if name == "checkpoint_saved" and step == start:
            break
        if name == "rewound" and is_number(step) and is_number(event.get("to")):
            found.append((int(step), int(event["to"])))
    return tuple(reversed(found))


def find_starts(run: Path, step: int) -> list[CheckpointEntry]:
    """Return the two newest checkpoints before a step, among the run's own and its tags.

    The older one is for a newest one that is damaged.
    """
    roots = [run / "checkpoints", *sorted(run.glob("tags/*/checkpoints"))]
    found = [one for root in roots for one in list_checkpoints(root) if one.step < step]
    return sorted(found, key=lambda one: one.step, reverse=True)[:2]


def fill_folder(
    run: Path,
    folder: Path,
    record: Mapping[str, Any],
    find: Callable[[], Sequence[CheckpointEntry]],
) -> CheckpointEntry | None:
    """Copy what a replay needs from a run into an empty folder; return the checkpoint.

    A run that trains meanwhile may delete a checkpoint before it is linked.

    Args:
        record: of the session that took the step: a resume may have changed settings or layout.
        find: returns the checkpoints to begin with, the first that is not damaged; none: the run's
            first step.

    Raises:
        ConfigError: a file cannot be read or written.
    """
    try:
        for name in ("run.toml", "plan.json"):
            if (run / name).is_file():
                shutil.copyfile(run / name, folder / name)
        text = record.get("configuration")
        if isinstance(text, str) and (folder / "run.toml").is_file():
            (folder / "run.toml").write_text(text, encoding="utf-8")
        for tries_left in reversed(range(TRIES)):
            found = find()
            try:
                for start in found:
                    _link_checkpoint(start, folder)
                return found[0] if found else None
            except FileNotFoundError:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                if not tries_left:
                    raise
    except OSError as failure:
        raise ConfigError(f"{run}: {failure.filename}: {failure.strerror}") from failure
    return None


def _link_checkpoint(start: CheckpointEntry, folder: Path) -> None:
    target = folder / "checkpoints" / start.path.name
    target.mkdir(parents=True, exist_ok=True)  # a tag may have the same step
    for path in start.path.iterdir():
        if path.is_file():
            _link_or_copy(path, target / path.name)


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(path, target)


def read_rows(folder: Path, first: int, last: int) -> dict[int, Record]:
    """Return the rows of metrics.jsonl of some steps; for a step that ran twice, the last.

    Args:
        first, last: the steps, both included.
    """
    return _read_lines(folder / "metrics.jsonl", first, last)


def read_statistics(folder: Path, first: int, last: int) -> dict[int, Record]:
    """Return the lines of statistics.jsonl of some steps; for a step that ran twice, the last."""
    return _read_lines(folder / "statistics.jsonl", first, last)


def _read_lines(path: Path, first: int, last: int) -> dict[int, Record]:
    rows: dict[int, Record] = {}
    for line in iter_newest_lines(path):
        row = parse_step(line)
        if row is None or row["step"] > last:
            continue
        if row["step"] < first:
            break
        rows.setdefault(row["step"], row)
    return dict(sorted(rows.items()))


def read_last_step(folder: Path) -> int:
    """Return the newest step of metrics.jsonl; 0 without any."""
    newest = read_newest_steps(folder / "metrics.jsonl", 1)
    return newest[0]["step"] if newest else 0
