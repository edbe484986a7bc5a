"""Tolerant readers of a run's JSON files, which a disk, an editor or a crash may damage.

A run folder's JSON is for information: one bad byte in it must not stop a run, a resume or a
picture. So a line or a file that is no JSON object counts as absent, and a step's field that should
be a number and is not is left out. Checkpoints have other, strict readers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

Record = dict[str, Any]
BLOCK_BYTES = 1 << 16
"""Bytes per read from the end of a file; about a hundred steps."""

STEP_NUMBERS = (
    "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "mfu", "peak_memory_bytes",
    "comm_exposed_s", "data_wait_s", "loop_s", "gpu_utilisation",
)  # fmt: skip
"""Fields of a line of metrics.jsonl that are numbers, or null if a number was not finite."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float; True and False are not.

    >>> is_number(3), is_number(True), is_number("3"), is_number(float("inf")), is_number(10**400)
    (True, False, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def replace_non_finite(value: Any) -> Any:
    """Return JSON values with None for each NaN or infinite number, which JSON lacks.

    >>> replace_non_finite({"loss": float("nan"), "norms": (1.0, float("inf")), "step": 3})
    {'loss': None, 'norms': [1.0, None], 'step': 3}
    """
    if isinstance(value, dict):
        return {key: replace_non_finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_object(text: str | bytes) -> Record | None:
    r"""Parse the JSON object in a line or a file; None if the text has none. Raises nothing.

    >>> parse_object('{"step": 1}'), parse_object(b"null"), parse_object(b"\xff"), parse_object("")
    ({'step': 1}, None, None, None)
    >>> parse_object("[" * 100_000) is None
    True
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_object(path: Path) -> Record:
    """Read the JSON object in a file; {} if the file is unreadable or has none."""
    try:
        return parse_object(path.read_bytes()) or {}
    except OSError:
        return {}


def parse_step(text: str | bytes) -> Record | None:
    """Parse one line of metrics.jsonl; None if it is no JSON object with an integer `step`.

    Fields in STEP_NUMBERS (loss, lr, …) that are neither null nor a finite number are left out.

    >>> parse_step('{"step": 3, "loss": null, "lr": "0.1", "tokens": 8}')
    {'step': 3, 'loss': None, 'tokens': 8}
    >>> parse_step('{"step": "3"}') is None
    True
    """
    found = parse_object(text)
    if found is None or not is_number(found.get("step")) or found["step"] != int(found["step"]):
        return None
    numbers = {key for key in STEP_NUMBERS if found.get(key) is not None}
    return {key: v for key, v in found.items() if key not in numbers or is_number(v)}


def parse_event(text: str | bytes) -> Record | None:
    """Parse one line of events.jsonl; None if it is no JSON object whose `event` is a text.

    >>> parse_event('{"event": "notice", "text": "a"}'), parse_event('{"event": 1}')
    ({'event': 'notice', 'text': 'a'}, None)
    """
    found = parse_object(text)
    return found if found is not None and isinstance(found.get("event"), str) else None


def iter_lines_backward(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    r"""Yield the complete lines of a file, newest first, each with its offset and no line break.

    It reads only the blocks that the caller consumes, so a year of logs does not slow a resume.
    Text after the last line break is an incomplete line and is left out.

    >>> import io
    >>> list(iter_lines_backward(io.BytesIO(b"a\nbc\n\nhalf")))
    [(5, b''), (2, b'bc'), (0, b'a')]
    """
    place = file.seek(0, os.SEEK_END)
    behind: list[bytes] = []  # pieces of a line of which the beginning is not read yet
    in_line = False
    while place:
        size = min(BLOCK_BYTES, place)
        place = file.seek(place - size)
        *lines, last = file.read(size).split(b"\n")
        # `last` belongs to the line that continues in the following block.
        behind.append(last)
        end = place + size - len(last)
        for line in reversed(lines):
            if in_line:
                yield end, b"".join(reversed(behind))
            in_line, behind = True, [line]
            end -= len(line) + 1
    if in_line:
        yield 0, b"".join(reversed(behind))


def iter_newest_lines(path: Path, most: int | None = None) -> Iterator[bytes]:
    """Yield the complete lines of a file, newest first; none of a file that cannot be read.

    Args:
        most: maximum number of lines; None: all.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        for _, line in itertools.islice(iter_lines_backward(file), most):
            yield line


def read_newest_steps(path: Path, most: int, after: int = 0) -> list[Record]:
    """Read the newest readable lines of a metrics.jsonl, oldest of them first.

    Args:
        most: maximum number of lines.
        after: last step to leave out.
    """
    return read_newest(path, parse_step, most, lambda step: step["step"] <= after)


def read_newest(
    path: Path,
    parse: Callable[[bytes], Record | None],
    most: int,
    ends: Callable[[Record], bool] = lambda _: False,
) -> list[Record]:
    """Read the newest readable lines of a log, oldest of them first; [] if there is none.

    Args:
        parse: returns the record of a line, or None to leave it out.
        most: maximum number of lines.
        ends: returns whether a record and all before it are left out.
    """
    found: list[Record] = []
    for record in filter(None, map(parse, iter_newest_lines(path))):
        if len(found) == most or ends(record):
            break
        found.append(record)
    return found[::-1]
