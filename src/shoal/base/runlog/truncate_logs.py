"""Cuts lines of later steps off metrics.jsonl, and puts damaged ones aside, when a run goes on.

Only the end of the file is read, and mostly it is only made shorter: a run of a million steps goes
on as fast as one of ten.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from shoal.base.runlog.damaged_lines import lines_from_end, parse_event, parse_object, parse_step

UNREADABLE = math.inf
"""In the place of the step of a damaged line: later than any."""
LOOK_BYTES = 1 << 20
"""So much before the first line that goes is looked at too, for damaged lines."""


def cut_lines(path: Path, step: int) -> str:
    """Drop the lines of steps after `step`, and a half-written last line; gives a line to tell.

    Lines near the end that cannot be read are put aside into `metrics.jsonl.damaged`, and told;
    what is left of it where the disk refuses is told, too.
    """

    def step_of(line: bytes) -> float:
        record = parse_step(line)
        return UNREADABLE if record is None else record["step"]

    return _told(path, step_of, step, f"still holds steps after {step}")


def mend_folder(folder: Path) -> list[str]:
    """Put aside what of events.jsonl and plan.json cannot be read, before a run goes on there.

    Returns:
        lines to tell. Half a line at the end of events.jsonl goes: it would spoil the next one.
    """
    events, plan = folder / "events.jsonl", folder / "plan.json"
    told = [_told(events, lambda line: UNREADABLE if parse_event(line) is None else 0, 0, "")]
    try:
        if parse_object(plan.read_bytes()) is None:
            os.replace(plan, plan.with_name(f"{plan.name}.damaged"))
            told.append(f"{plan}: cannot be read, put aside as {plan.name}.damaged")
    except OSError:
        pass  # there is none, or nothing can be mended here
    return [line for line in told if line]


def _told(path: Path, step_of: Callable[[bytes], float], step: int, otherwise: str) -> str:
    """Cut a file; gives the line to tell. otherwise: said where the disk refuses; "" nothing."""
    try:
        with path.open("rb") as file:
            damaged = _cut(path, file, step_of, step)
    except FileNotFoundError:
        return ""
    except OSError as failure:  # a full disk must not stop training
        return f"{path}: {otherwise}: {failure.strerror}" if otherwise else ""
    if not damaged:
        return ""
    word = "line" if damaged == 1 else "lines"
    return f"{path}: {damaged} {word} that cannot be read, put aside into {path.name}.damaged"


def _cut(path: Path, file: BinaryIO, step_of: Callable[[bytes], float], step: int) -> int:
    """Gives how many damaged lines were put aside."""
    size = first = file.seek(0, os.SEEK_END)
    known: list[tuple[int, bytes, float]] = []
    for place, line in lines_from_end(file):
        known.append((place, line, step_of(line)))
        if known[-1][2] > step:
            first = place
        elif place < first - LOOK_BYTES:
            break
    end = known[0][0] + len(known[0][1]) + 1 if known else 0
    first = min(first, end)  # what follows the last line break is half a line
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
            return  # somebody else cut it
        out.write(block)
        size -= len(block)
