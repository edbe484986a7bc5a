"""Sinks that write a file of their own: TensorBoard's events, and CSV.

After a resume or a rewind steps are made again. Both files then have each step once: TensorBoard
purges the older events when it reads them, and CSV drops the older rows.
"""

from __future__ import annotations

import atexit
import csv
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.sinks.scalar_columns import ScalarSink, missing_package

FLUSH_S = 10
"""Seconds until values appear in TensorBoard."""
CSV_FILE = "metrics.csv"


class TensorBoard(ScalarSink):
    """A hook that draws each step's and each validation's numbers; rank 0 writes.

    Args:
        folder: where its files go; made with the first number.

    Raises:
        ConfigError: tensorboard is not installed; raised before the first step.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as failure:
            raise missing_package("tensorboard", "TensorBoard") from failure
        super().__init__(folder)
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Draw the numbers of a step."""
        if self._writer is None:
            # After a resume, steps are drawn again from its first step.
            self._writer = self._make(str(self.folder), purge_step=step, flush_secs=FLUSH_S)
            atexit.register(self._writer.close)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class CSV(ScalarSink):
    """A hook that writes `metrics.csv`: a row per step and per validation; rank 0 writes.

    The first column is the step, the others are named in the header: train/loss, validation/loss,
    … A number that a row lacks, or that is not finite, is empty. A new name becomes a new column:
    the file is then written again, and replaced when it is complete. Full disks stop no run: rows
    are lost, which a warning reports once.

        pandas.read_csv("runs/x/metrics.csv", index_col="step")

    Args:
        folder: where the file goes; made with the first number.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.path = self.folder / CSV_FILE
        self._columns: list[str] | None = None
        self._last_step, self._warned = 0, False

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append a row; first drop the rows of steps that are made again."""
        try:
            self._prepare(step, values)
            row = [step, *(values.get(name, "") for name in self._columns or ())]
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(row)
            self._last_step = step
        except OSError as failure:
            if not self._warned:
                self._warned = True
                logging.getLogger("shoal").warning(
                    "shoal: %s: rows are lost: %s", self.path, failure.strerror or failure
                )

    def _prepare(self, step: int, values: dict[str, float]) -> None:
        """Write the file again if it has rows of steps to come, or lacks a column."""
        is_step = any(name.startswith("train/") for name in values)
        back = self._columns is None or step < self._last_step + is_step
        if self._columns is not None and not back and values.keys() <= set(self._columns):
            return
        columns, rows = read_rows(self.path)
        new = [*columns, *(name for name in values if name not in columns)]
        train = [at for at, name in enumerate(columns) if name.startswith("train/")]

        def is_retained(number: int, cells: list[str]) -> bool:
            if not back or number < step:
                return True
            return number == step and not is_step and any(cells[at] for at in train)

        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with fresh.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["step", *new])
                for number, cells in rows:
                    if is_retained(number, cells):
                        writer.writerow([number, *cells, *[""] * (len(new) - len(cells))])
            os.replace(fresh, self.path)
        finally:
            fresh.unlink(missing_ok=True)
        self._columns = new


def read_rows(path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the columns of a metrics.csv after `step`, and its complete rows.

    Returns:
        ([], no rows) if the file is absent or none of ours; a torn row is left out.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        head = []
    if head[:1] != ["step"]:
        return [], iter(())
    return head[1:], _iter_rows(path, len(head))


def _iter_rows(path: Path, width: int) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(line for line in file if line.endswith("\n") and "\0" not in line)
        next(reader, None)
        for row in reader:
            if len(row) == width and row[0].isdecimal():
                yield int(row[0]), row[1:]
