"""Search for the user's own line in a stack, which consists mostly of library frames."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

OWN_FOLDER = str(Path(__file__).resolve().parents[2])


def user_line(trace: TracebackType | None) -> str | None:
    """Return `FILE:LINE` of the innermost user frame in a traceback.

    Frames of Shoal, installed packages and Python itself are skipped; None if there are no others.
    FILE is relative to the working folder, or the bare name if it is outside.
    """
    foreign = tuple(_foreign_folders())
    found: str | None = None
    while trace is not None:
        found = _place(trace.tb_frame, trace.tb_lineno, foreign) or found
        trace = trace.tb_next
    return found


def user_line_of_frame(frame: FrameType | None) -> str:
    """Return `FILE:LINE` of the user's line in a running thread's stack, from its innermost frame.

    Frames of Shoal, installed packages and Python itself are skipped; "" if there are no others.
    FILE is relative to the working folder, or the bare name if it is outside.
    """
    foreign = tuple(_foreign_folders())
    while frame is not None:
        found = _place(frame, frame.f_lineno, foreign)
        if found:
            return found
        frame = frame.f_back
    return ""


def _place(frame: FrameType, line: int, foreign: tuple[str, ...]) -> str:
    name = frame.f_code.co_filename
    path = os.path.abspath(name)
    if name.startswith("<") or path.startswith(foreign):
        return ""
    shown = os.path.relpath(path)
    return f"{Path(path).name if shown.startswith('..') else shown}:{line}"


def _foreign_folders() -> Iterator[str]:
    yield OWN_FOLDER + os.sep
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        yield folder + os.sep
    for key in ("stdlib", "platstdlib"):
        yield sysconfig.get_path(key) + os.sep
