"""The line of a script that calls a function, if no code of Shoal stands between them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

TORCH, OWN = str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2])


def calling_line() -> str:
    """Return FILE:LINE of the script that called the caller; "" if Shoal called it.

    Frames of torch are skipped: the script may call a function of torch that makes the call.
    """
    frame = _find_frame(sys._getframe(2))
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_called_by_library() -> bool:
    """Return whether an installed package called the caller, and no code of Shoal."""
    frame = _find_frame(sys._getframe(2))
    return frame is not None and "site-packages" in frame.f_code.co_filename


def _find_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            return None
        if not name.startswith((TORCH, "<")):
            return frame
        frame = frame.f_back
    return None
