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
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            return ""
        if not name.startswith((TORCH, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
