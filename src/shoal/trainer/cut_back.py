"""Cuts the lines of later steps off metrics.jsonl, when a run goes on from an earlier one.

Only the end of the file is read, and mostly it is only made shorter: a run of a million steps goes
on as fast as one of ten.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO

from shoal.base.lines import lines_from_end, parse_step

UNREADABLE = math.inf
"""In the place of the step of a damaged line: later than any."""
LOOK_BYTES = 1 << 20
"""So much before the first line that goes is looked at too, for damaged lines."""


def cut_lines(path: Path, step: int) -> str:
    """Drop the lines of steps after `step`, and a half-written last line; gives a line to tell.

    Lines near the end that cannot be read are put aside into `metrics.jsonl.damaged`, and told;
    what is left of it where the disk refuses is told, too.
    """
    try:
        with path.open("rb") as file:
            damaged = _cut(path, file, step)
    except FileNotFoundError:
        return ""
    except OSError as failure:  # a full disk must not stop training
        return f"{path}: still holds steps after {step}: {failure.strerror}"
    if not damaged:
        return ""
    word = "line" if damaged == 1 else "lines"
    return f"{path}: {damaged} {word} that cannot be read, put aside into {path.name}.damaged"


def _cut(path: Path, file: BinaryIO, step: int) -> int:
    """Gives how many damaged lines were put aside."""
    size = first = file.seek(0, os.SEEK_END)
    known: list[tuple[int, bytes, float]] = []
    for place, line in lines_from_end(file):
        record = parse_step(line)
        known.append((place, line, UNREADABLE if record is None else record["step"]))
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
