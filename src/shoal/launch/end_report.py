"""Report of a run that has ended: whether it is due, and the process that writes it.

    shoal train   the process that started the ranks writes it, and prints its path
    watchdog      is replaced by `python -m shoal.report.report_page FOLDER` after the ranks ended

So ranks of a user's own loop, of torchrun or of Slurm spend nothing on it. The rule reads the last
lines of metrics.jsonl alone: a run of a few steps pays a millisecond. A report is no part of a run:
whatever fails in it is one line on standard error.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.base.runlog.damaged_lines import is_number, read_newest_steps
from shoal.base.standard_streams import flush_streams, write_error

REPORT_STEPS, REPORT_S = 20, 5.0
"""Steps, and seconds of steps, from which the end of a run writes its report."""
REPORT_BYTES = 100_000_000
"""Bytes of metrics and rank records above which it would delay the exit by over two seconds."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a process that imports numpy for a report: threads cost more than they compute."""
WRITER = "shoal.report.report_page"
"""Module whose program writes the reports of the folders that it gets as arguments."""


def is_report_due(folder: Path) -> bool:
    """Return whether a run was long enough for a report at its end.

    Args:
        folder: of the run; one of islands has their folders in it.
    """
    return any(_is_long_enough(path) for path in _list_metrics(folder))


def exceeds_report_bytes(folder: Path) -> bool:
    """Return whether the records of a run are too large for a report at its end."""
    files = _list_metrics(folder)
    files += [one for path in files for one in path.parent.glob("rank_steps/node-*.bin")]
    try:
        return sum(file.stat().st_size for file in files) > REPORT_BYTES
    except OSError:  # a file is gone: so is the run
        return True


def command_line(folder: Path) -> str:
    """Return the line for the user of a run that writes no report itself."""
    return f"report: shoal report {shlex.quote(str(folder))}"


def replace_process_by_report(folders: Sequence[Path]) -> None:
    """Replace this process by one that writes the reports that are due; return if none is.

    Args:
        folders: of runs that have ended.
    """
    ended = dict.fromkeys(folders)
    due = [one for one in ended if is_report_due(one) and not exceeds_report_bytes(one)]
    if not due:
        return
    flush_streams()
    try:
        words = [sys.executable, "-m", WRITER, *map(str, due)]
        os.execve(sys.executable, words, {**os.environ, **ONE_THREAD})
    except OSError as failure:
        write_error(f"shoal: report: cannot be started: {failure.strerror}; {command_line(due[0])}")


def _is_long_enough(path: Path) -> bool:
    """Return whether the steps of a metrics.jsonl are enough, in number and in seconds."""
    rows = read_newest_steps(path, REPORT_STEPS)
    times_s = [row["step_s"] for row in rows if is_number(row.get("step_s"))]
    if len(times_s) < REPORT_STEPS:
        return False
    return bool(rows[-1]["step"] * statistics.median(times_s) >= REPORT_S)


def _list_metrics(folder: Path) -> list[Path]:
    """Return the metrics.jsonl of a run, or of its islands if it has no steps of its own."""
    path = folder / "metrics.jsonl"
    return [path] if path.exists() else sorted(folder.glob("island-*/metrics.jsonl"))
