"""Figures of all steps of a run for its curves, at most MOST_POINTS of them.

Of a long metrics.jsonl only lines at evenly spaced offsets are read, so that a run of a million
steps opens at once. Later steps are added as they come; past MOST_POINTS every second point goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number, parse_step
from shoal.view.watch.watch_state import StepPoint

MOST_POINTS = 1_024
WHOLE_BYTES = 1 << 20
"""A file up to this size is read whole."""
SAMPLES = 512
LINE_BYTES = 1 << 13


class LossHistory:
    """The points of a run's curves, by step."""

    def __init__(self) -> None:
        self.points: list[StepPoint] = []

    def add(self, records: Iterable[Record], cut_back: bool = False) -> None:
        """Add steps; repeated steps replace their older figures."""
        for record in records:
            point = _point(record)
            while self.points and self.points[-1].step >= point.step:
                self.points.pop()
            self.points.append(point)
        if len(self.points) > MOST_POINTS:
            self.points = self.points[:-1:2] + self.points[-1:]

    def read(self, path: Path) -> None:
        """Read the steps of a metrics.jsonl, or a sample of them."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                if size <= WHOLE_BYTES:
                    lines = file.read().split(b"\n")[:-1]
                else:
                    lines = []
                    for place in range(SAMPLES):
                        file.seek(size * place // SAMPLES)
                        pieces = file.read(LINE_BYTES).split(b"\n")
                        first = 1 if place else 0  # elsewhere the first piece is half a line
                        lines += pieces[first : first + 1] if len(pieces) > first + 1 else []
        except OSError:
            return
        self.add(record for line in lines if (record := parse_step(line)) is not None)


def _point(record: Record) -> StepPoint:
    loss, norm, step_s = (
        float(record[key]) if is_number(record.get(key)) else math.nan
        for key in ("loss", "grad_norm", "step_s")
    )
    return StepPoint(int(record["step"]), loss, norm, step_s)
