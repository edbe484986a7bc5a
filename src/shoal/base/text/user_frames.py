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
    found = list_user_frames(trace)
    return frame_text(*found[-1]) if found else None


def list_user_frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the user's frames in a traceback with their lines, the innermost last."""
    foreign, found = tuple(_foreign_folders()), list[tuple[FrameType, int]]()
    while trace is not None:
        if frame_text(trace.tb_frame, trace.tb_lineno, foreign):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def user_line_of_frame(frame: FrameType | None) -> str:
    """Return `FILE:LINE` of the user's line in a running thread's stack, from its innermost frame.

    Frames of Shoal, installed packages and Python itself are skipped; "" if there are no others.
    FILE is relative to the working folder, or the bare name if it is outside.
    """
    foreign = tuple(_foreign_folders())
    while frame is not None:
        found = frame_text(frame, frame.f_lineno, foreign)
        if found:
            return found
        frame = frame.f_back
    return ""


def frame_text(frame: FrameType, line: int, foreign: tuple[str, ...] = ()) -> str:
    """Return `FILE:LINE` of a frame; "" in a folder of `foreign`, and for code without a file."""
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
