"""Reads a run folder while others write it: new lines of its logs, its plan, its checkpoints.

`metrics.jsonl` and `events.jsonl` grow line by line; a reader may meet half a line (it waits for
the rest), a torn one (it skips it), and a file that was cut back because the run resumed at an
earlier step (it reads the end of that file again: a history of a million steps costs nothing).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from shoal.base.runlog.atomic_files import saved_steps
from shoal.base.runlog.damaged_lines import (
    Record,
    lines_from_end,
    newest_steps,
    parse_event,
    parse_object,
    parse_step,
    read_object,
)

AGAIN_BYTES = 1 << 18
"""How much of the end of a file is read again when it was cut back."""


class Tail:
    """Gives the lines of a growing JSON-lines file that were not given before.

    Args:
        path: may not exist yet.
        parse: a line's record; complete lines without one are left out.

    `skip()` counts what the file holds now as given, without reading it
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Record | None] = parse_object) -> None:
        self.path = path
        self._parse = parse
        self._offset = 0
        self._last_line = b""

    def skip(self) -> None:
        """Give nothing of what the file holds now."""
        try:
            with self.path.open("rb") as file:
                place, line = next(lines_from_end(file), (0, None))
        except OSError:
            return
        if line is not None:
            self._offset, self._last_line = place + len(line) + 1, line + b"\n"

    def read(self) -> tuple[list[Record], bool]:
        """(new records, whether the file was cut back: then these are the last ones it holds)."""
        try:
            if self.path.stat().st_size == self._offset:
                return [], False
            with self.path.open("rb") as file:
                cut_back = not self._still_there(file)
                if cut_back:
                    self._offset, self._last_line = _last_start(file), b""
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        lines = [line + b"\n" for line in whole.split(b"\n")[:-1]]
        if lines:
            self._offset += len(whole)
            self._last_line = lines[-1]
        return [record for line in lines if (record := self._parse(line)) is not None], cut_back

    def _still_there(self, file: Any) -> bool:
        # A file that was cut and has grown again may be longer than before: compare the last line.
        file.seek(self._offset - len(self._last_line))
        return bool(file.read(len(self._last_line)) == self._last_line)


def _last_start(file: BinaryIO) -> int:
    """Where the first whole line of the last AGAIN_BYTES of a file begins."""
    start = file.seek(max(0, file.seek(0, os.SEEK_END) - AGAIN_BYTES))
    return start + len(file.readline()) if start else 0


class RunFolder:
    """One run's files; everything may be missing, as it is at the very start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Tail(path / "metrics.jsonl", parse_step)
        self.events = Tail(path / "events.jsonl", parse_event)

    def plan(self) -> Record:
        """plan.json; empty if there is none."""
        return read_object(self.path / "plan.json")

    def last_steps(self, most: int, after: int = 0) -> list[Record]:
        """The newest lines of metrics.jsonl, at most so many, of steps later than `after`."""
        return newest_steps(self.path / "metrics.jsonl", most, after)

    def checkpoints(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first."""
        return saved_steps(self.path)


def last_session(events: list[Record]) -> list[Record]:
    """Give the events from the last `run_started` on; all of them where there is none.

    A restart by Shoal's supervisor or guardian (islands) writes none; by torchrun or SLURM it does.

    >>> [e["event"] for e in last_session([{"event": "notice"}, {"event": "run_started"}])]
    ['run_started']
    """
    starts = [index for index, event in enumerate(events) if event.get("event") == "run_started"]
    return events[starts[-1] :] if starts else events
