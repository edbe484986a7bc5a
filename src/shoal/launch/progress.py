"""Whether an attempt got anywhere, and how long its steps take, from the end of `metrics.jsonl`."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.base.lines import Record, is_number, parse_step

TAIL_BYTES = 16384


class Progress:
    """Whether an attempt added anything to `metrics.jsonl`, which a resume may first cut back.

    made   in this attempt · ever  in any
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False
        self.ever = False
        self.size_bytes = 0

    def begin(self) -> None:
        """A new attempt starts."""
        self.made, self.size_bytes = False, self._size()

    def look(self) -> None:
        """Compare with the last look."""
        size_bytes = self._size()
        self.made = self.made or size_bytes > self.size_bytes
        self.ever = self.ever or self.made
        self.size_bytes = size_bytes

    def step_s(self) -> float:
        """Seconds of the longest of the last steps; 0 before the first."""
        times = [row.get("step_s") for row in self._last_rows()]
        return max((time_s for time_s in times if is_number(time_s)), default=0.0)

    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return max((int(row["step"]) for row in self._last_rows()), default=0)

    def _last_rows(self) -> list[Record]:
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                rows = [parse_step(line) for line in file.read().splitlines()]
        except OSError:
            return []
        return [row for row in rows if row is not None]

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
