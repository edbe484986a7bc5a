"""Display of the row of a comparison that is being measured."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any, TextIO

from shoal.view.phase_lines import WaitLineSchedule, read_current_phases
from shoal.view.progress import fit_words

Record = dict[str, Any]


class ComparisonProgress:
    """Display of which row of a comparison is being measured; call `tick` often, `finish` once.

    On a terminal one line is redrawn in place; elsewhere every measured row gets a `key=value`
    line, and so does, ever more rarely, the current phase.

    Args:
        path: rows.jsonl, which the workers write; phase.json is read beside it.
        asked: (layout, processes) of every row.
        skip: lines of the file that earlier displays have shown.
        quiet: write nothing but the line in place.
    """

    def __init__(
        self,
        path: Path,
        asked: list[tuple[str, int]],
        stream: TextIO,
        *,
        quiet: bool = False,
        skip: int = 0,
    ) -> None:
        self.path, self.asked, self.stream = path, asked, stream
        self.quiet, self.told = quiet, skip
        self.text, self.began_s = "starting processes", time.monotonic()
        self.unit = "samples"
        self.began: int | None = None
        self.on_terminal = stream.isatty()
        self.silence, self.since_s = WaitLineSchedule(), time.time()

    def tick(self) -> None:
        """Read new lines and show them; cheap."""
        for record in self._read_new():
            self.unit = record.get("unit", self.unit)
            if "began" in record:
                self.began = record["began"]
                layout, parts = self.asked[record["began"]]
                self.text = (
                    f"measuring {layout} × {parts} (row {record['began'] + 1} of {len(self.asked)})"
                )
                self.began_s = time.monotonic()
            elif "row" in record and not self.on_terminal and not self.quiet:
                self.stream.write(self._key_values(record) + "\n")
                self.stream.flush()
                self.silence.broken()
        doing = read_current_phases(self.path.parent, self.since_s)
        if self.on_terminal:
            waited_s = math.floor(time.monotonic() - self.began_s)
            what = [doing.names()] if doing.phases else []
            width = shutil.get_terminal_size().columns - 1
            text = fit_words([self.text, f"{waited_s} s", *what], width, " · ") or self.text[:width]
            self.stream.write(f"\r{text}\x1b[K")
            self.stream.flush()
        elif not self.quiet and (line := self.silence.line(doing)):
            self.stream.write(f"{self._row_values()}{line}\n")
            self.stream.flush()

    def finish(self) -> None:
        """Show the remaining lines and clear the line in place."""
        self.tick()
        if self.on_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _read_new(self) -> list[Record]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()[self.told :]
        self.told += len(lines)
        return [json.loads(line) for line in lines]

    def _row_values(self) -> str:
        if self.began is None:
            return ""
        layout, parts = self.asked[self.began]
        return f"layout={layout} processes={parts} "

    def _key_values(self, record: Record) -> str:
        layout, parts = self.asked[record["row"]]
        words = f"layout={layout} processes={parts}"
        if not record.get("per_s"):
            return f"{words} reason={json.dumps(record['reason'], ensure_ascii=False)}"
        return f"{words} {self.unit}_per_s={record['per_s']:.0f}"
