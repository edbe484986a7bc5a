"""Truncation of metrics.jsonl after the resumed step, and quarantine of damaged lines.

It reads only the end of the file, and mostly only truncates it: a run of a million steps resumes as
fast as one of ten.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from shoal.base.runlog.damaged_lines import (
    iter_lines_backward,
    parse_event,
    parse_object,
    parse_step,
)

UNREADABLE = math.inf
"""Step number of a damaged line: later than any."""
LOOK_BYTES = 1 << 20
"""Bytes before the first dropped line that are checked too, for damaged lines."""


def truncate_steps(path: Path, step: int) -> str:
    """Drop the lines of steps after `step`, and a half-written last line; return a report line.

    Unreadable lines near the end are moved to `metrics.jsonl.damaged` and reported; a failed write
    is reported, too.
    """

    def step_of(line: bytes) -> float:
        record = parse_step(line)
        return UNREADABLE if record is None else record["step"]

    return _truncate_and_report(path, step_of, step, f"still holds steps after {step}")


def quarantine_damage(folder: Path) -> list[str]:
    """Move unreadable parts of events.jsonl and plan.json to `*.damaged`, before a resume.

    Returns:
        report lines. An incomplete line at the end of events.jsonl is dropped, since it would spoil
            the next one.
    """
    events, plan = folder / "events.jsonl", folder / "plan.json"
    told = [
        _truncate_and_report(
            events, lambda line: UNREADABLE if parse_event(line) is None else 0, 0, ""
        )
    ]
    try:
        if parse_object(plan.read_bytes()) is None:
            os.replace(plan, plan.with_name(f"{plan.name}.damaged"))
            told.append(f"{plan}: cannot be read, put aside as {plan.name}.damaged")
    except OSError:
        pass  # the file is missing, or cannot be repaired here
    return [line for line in told if line]


def _truncate_and_report(
    path: Path, step_of: Callable[[bytes], float], step: int, otherwise: str
) -> str:
    """Truncate a file and return a report line; `otherwise`: the line if the disk refuses."""
    try:
        with path.open("rb") as file:
            damaged = _truncate_file(path, file, step_of, step)
    except FileNotFoundError:
        return ""
    except OSError as failure:  # a full disk must not stop training
        return f"{path}: {otherwise}: {failure.strerror}" if otherwise else ""
    if not damaged:
        return ""
    word = "line" if damaged == 1 else "lines"
    return f"{path}: {damaged} {word} that cannot be read, put aside into {path.name}.damaged"


def _truncate_file(path: Path, file: BinaryIO, step_of: Callable[[bytes], float], step: int) -> int:
    """Truncate an open file; return the number of damaged lines moved away."""
    size = first = file.seek(0, os.SEEK_END)
    known: list[tuple[int, bytes, float]] = []
    for place, line in iter_lines_backward(file):
        known.append((place, line, step_of(line)))
        if known[-1][2] > step:
            first = place
        elif place < first - LOOK_BYTES:
            break
    end = known[0][0] + len(known[0][1]) + 1 if known else 0
    first = min(first, end)  # text after the last line break is an incomplete line
    if first == size:
        return 0
    tail = [one for one in reversed(known) if one[0] >= first]
    kept = [line + b"\n" for _, line, at in tail if at <= step]
    damaged = [line + b"\n" for _, line, at in tail if at == UNREADABLE]
    if damaged:
        with path.with_name(f"{path.name}.damaged").open("ab") as aside:
            aside.writelines(damaged)
    if not kept:
        os.truncate(path, first)
        return len(damaged)
    fresh = path.with_suffix(".fresh")
    with fresh.open("wb") as out:
        file.seek(0)
        _copy(file, out, first)
        out.writelines(kept)
    os.replace(fresh, path)
    return len(damaged)


def _copy(file: BinaryIO, out: BinaryIO, size: int) -> None:
    while size:
        block = file.read(min(size, LOOK_BYTES))
        if not block:
            return  # another process truncated it
        out.write(block)
        size -= len(block)
