"""Let `breakpoint()` in user code stop in the asked step of a replay, and nowhere else.

A model is called before that step too: for the plan's forecast, in trials of guards, and in earlier
steps. A user who looks into step 412 wants to stop there. Several processes have no terminal, so
they pass over breakpoints.
"""

from __future__ import annotations

import os
import pdb
import sys
from types import FrameType
from typing import Any

TRIAL = "_trial"
"""End of the names of Shoal's modules that call copies of the user's functions."""


class BreakpointGate:
    """Replacement of `sys.breakpointhook` that is closed before the asked step.

    Args:
        last_step: the step in which breakpoints stop.
        has_terminal: this process has the user's terminal.

    Attributes:
        step: the step under way; 0 before the first.
        passed_over: a breakpoint of the asked step did not stop, for want of a terminal.
    """

    def __init__(self, last_step: int, *, has_terminal: bool = True) -> None:
        self.last_step, self.has_terminal = last_step, has_terminal
        self.step, self.passed_over = 0, False
        self._right = sys.breakpointhook
        sys.breakpointhook = self._stop

    def begin_step(self, step: int) -> None:
        """Open the gate if a step is the asked one."""
        self.step = step

    def close(self) -> None:
        """Put the hook back that was there before."""
        sys.breakpointhook = self._right

    def _stop(self, *values: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        if self.step < self.last_step or _is_trial(frame):
            return None
        if not self.has_terminal:
            self.passed_over = True
            return None
        if self._right is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
            return pdb.Pdb().set_trace(frame)  # in the caller's frame, not in this one
        return self._right(*values, **named)


def _is_trial(frame: FrameType | None) -> bool:
    """Return whether a trial of a guard called the code of a frame."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("shoal.") and name.endswith(TRIAL):
            return True
        frame = frame.f_back
    return False
