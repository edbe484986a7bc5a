"""Reads a run folder while others write it: new lines of its logs, its plan, its checkpoints.

`metrics.jsonl` and `events.jsonl` grow line by line; a reader may meet half a line (it waits for
the rest), a torn one (it skips it), and a file that was cut back because the run resumed at an
earlier step (it reads that file again from its beginning).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Tail:
    """Gives the lines of a growing JSON-lines file that were not given before.

    path   may not exist yet; complete lines that are no JSON object are left out
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
        lines = whole.splitlines(keepends=True)
        if lines:
            self._offset += len(whole)
            self._last_line = lines[-1]
        return [record for line in lines if (record := self._parse(line)) is not None], cut_back

    def _still_there(self, file: Any) -> bool:
        # A file that was cut and has grown again may be longer than before: compare the last line.
        file.seek(self._offset - len(self._last_line))
        return bool(file.read(len(self._last_line)) == self._last_line)

    def _parse(self, line: bytes) -> Record | None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        return record if isinstance(record, dict) else None


class RunFolder:
    """One run's files; everything may be missing, as it is at the very start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Tail(path / "metrics.jsonl")
        self.events = Tail(path / "events.jsonl")

    def plan(self) -> Record:
        """plan.json; empty if there is none."""
        try:
            plan = json.loads((self.path / "plan.json").read_text())
        except (OSError, ValueError):
            return {}
        return plan if isinstance(plan, dict) else {}

    def checkpoints(self) -> list[int]:
        """Steps that have a complete checkpoint (its manifest is there), oldest first."""
        manifests = (self.path / "checkpoints").glob("step-*/manifest.json")
        names = [re.fullmatch(r"step-(\d+)", manifest.parent.name) for manifest in manifests]
        return sorted(int(name[1]) for name in names if name)


def last_session(events: list[Record]) -> list[Record]:
    """The events since the run was last started or resumed by a person.

    >>> [e["event"] for e in last_session([{"event": "notice"}, {"event": "run_started"}])]
    ['run_started']
    """
    starts = [index for index, event in enumerate(events) if event.get("event") == "run_started"]
    return events[starts[-1] :] if starts else events
