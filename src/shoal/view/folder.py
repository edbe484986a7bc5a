"""Reads a run folder while others write it: new lines of its logs, its plan, its checkpoints.

`metrics.jsonl` and `events.jsonl` grow line by line; a reader may meet half a line (it waits for
the rest), a torn one (it skips it), and a file that was cut back because the run resumed at an
earlier step (it reads that file again from its beginning).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.base.files import saved_steps
from shoal.base.lines import Record, parse_event, parse_object, parse_step, read_object


class Tail:
    """Gives the lines of a growing JSON-lines file that were not given before.

    path    may not exist yet · parse  a line's record; complete lines without one are left out
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Record | None] = parse_object) -> None:
        self.path = path
        self._parse = parse
        self._offset = 0
        self._last_line = b""

    def read(self) -> tuple[list[Record], bool]:
        """(new records, whether the file was cut back: then these are all records it holds)."""
        try:
            if self.path.stat().st_size == self._offset:
                return [], False
            with self.path.open("rb") as file:
                cut_back = not self._still_there(file)
                if cut_back:
                    self._offset, self._last_line = 0, b""
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


class RunFolder:
    """One run's files; everything may be missing, as it is at the very start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Tail(path / "metrics.jsonl", parse_step)
        self.events = Tail(path / "events.jsonl", parse_event)

    def plan(self) -> Record:
        """plan.json; empty if there is none."""
        return read_object(self.path / "plan.json")

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
