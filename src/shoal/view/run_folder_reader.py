"""Read a run folder while its run writes it: new lines of its logs, its plan, its checkpoints.

`metrics.jsonl` and `events.jsonl` grow line by line. A reader may meet half a line (it waits for
the rest), a torn one (it skips it), or a file that was truncated because the run resumed at an
earlier step. Of a truncated file it reads only the end again, so a history of a million steps costs
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.runlog.damaged_lines import (
    Record,
    iter_lines_backward,
    parse_event,
    parse_object,
    parse_step,
    read_newest_steps,
    read_object,
)

AGAIN_BYTES = 1 << 18
"""Bytes at the end of a file that are read again after a truncation."""


class JsonLinesTail:
    """Reader of the new lines of a growing JSON-lines file.

    `skip()` moves to the end of the file without reading it.

    Args:
        path: may not exist yet.
        parse: line → record; complete lines without a record are left out.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Record | None] = parse_object) -> None:
        self.path = path
        self._parse = parse
        self._offset = 0
        self._last_line = b""

    def skip(self) -> None:
        """Move to the end of the file, so that `read` returns only later lines."""
        try:
            with self.path.open("rb") as file:
                place, line = next(iter_lines_backward(file), (0, None))
        except OSError:
            return
        if line is not None:
            self._offset, self._last_line = place + len(line) + 1, line + b"\n"

    def read(self) -> tuple[list[Record], bool]:
        """Return the new records, and whether the file was truncated since the last call.

        After a truncation the records are the last ones of the file.
        """
        try:
            if self.path.stat().st_size == self._offset:
                return [], False
            with self.path.open("rb") as file:
                cut_back = not self._is_untruncated(file)
                if cut_back:
                    self._offset, self._last_line = _last_lines_offset(file), b""
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

    def _is_untruncated(self, file: Any) -> bool:
        # A truncated file that has grown again may be longer than before: compare the last line.
        file.seek(self._offset - len(self._last_line))
        return bool(file.read(len(self._last_line)) == self._last_line)


def _last_lines_offset(file: BinaryIO) -> int:
    """Return the offset of the first whole line of the last AGAIN_BYTES of a file."""
    start = file.seek(max(0, file.seek(0, os.SEEK_END) - AGAIN_BYTES))
    return start + len(file.readline()) if start else 0


class RunFolder:
    """Files of one run; any may be missing, as at the very start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLinesTail(path / "metrics.jsonl", parse_step)
        self.events = JsonLinesTail(path / "events.jsonl", parse_event)

    def plan(self) -> Record:
        """Return plan.json; {} if there is none."""
        return read_object(self.path / "plan.json")

    def last_steps(self, most: int, after: int = 0) -> list[Record]:
        """Return the newest lines of metrics.jsonl, at most `most`, of steps later than `after`."""
        return read_newest_steps(self.path / "metrics.jsonl", most, after)

    def checkpoints(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        return list_saved_steps(self.path)


def last_session_events(events: list[Record]) -> list[Record]:
    """Return the events from the last `run_started` on; all of them if there is none.

    A restart by Shoal's supervisor or guardian (islands) writes none; by torchrun or SLURM it does.

    >>> [e["event"] for e in last_session_events([{"event": "notice"}, {"event": "run_started"}])]
    ['run_started']
    """
    starts = [index for index, event in enumerate(events) if event.get("event") == "run_started"]
    return events[starts[-1] :] if starts else events
