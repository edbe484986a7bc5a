"""Exception hook that prints an uncaught ShoalError as one line with the user's file and line.

    shoal: train.py:34: loss returned a mean: ranks with unequal token counts would weigh wrongly …

The exit status is the error's own (2: something to correct, 3: the numbers, 1: anything else).
With several ranks each rank that raises prints its line, with `[rank 1]` before it. A line that all
ranks would print is printed by rank 0 alone. A rank whose collective broke because a peer left
prints one line too, so that it does not bury the peer's own line. Every other error goes to the
ordinary hook, with a last line on the user's own frames. With several ranks the process then ends
after the functions of atexit: messages to peers that wait for this rank would block it for ever.
SHOAL_TRACEBACK=1 shows tracebacks. `shoal.parallelize` installs the hook, unless another one is
installed (IPython, a debugger). torch.distributed wraps the hook that it finds; such a wrapper
counts as Python's.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shoal.fabric import World

if TYPE_CHECKING:
    from shoal.checkpoint.format.lease import RunLease
    from shoal.trainer.metrics_recorder import MetricsRecorder
    from shoal.trainer.process.crash_report import CrashedRun

Start = TypeVar("Start", bound=Callable[..., Any])
open_starts: list[list[Path]] = []
"""Calls of `shoal.parallelize` that are under way, with the folders that each found missing."""


def install_excepthook() -> ShoalErrorHook:
    """Replace `sys.excepthook` if it is Python's own or torch's; return the hook in place.

    Call it again after a process group was made: torch has then wrapped the earlier hook.
    """
    current = sys.excepthook
    if isinstance(current, ShoalErrorHook):
        return current
    hook = ShoalErrorHook(current)
    if current is sys.__excepthook__ or current.__module__ == "torch.distributed.distributed_c10d":
        sys.excepthook = hook
    return hook


class ShoalErrorHook:
    """Callable for `sys.excepthook`, which Python calls with an uncaught exception.

    Attributes:
        ordinary: the hook that shows every other exception.
        world: the processes, once they are known.
        recorded: recorder and lease of the last run with a folder, which keeps the error.
        run: the last run.
    """

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        self.ordinary = ordinary
        self.world: World | None = None
        self.recorded: tuple[MetricsRecorder, RunLease | None] | None = None
        self.run: Callable[[], CrashedRun | None] | None = None

    def follow(self, run: CrashedRun) -> None:
        """Take the run of a loop of the user's own as the last one."""
        self.run = weakref.ref(run)
        run.skips.is_own_loop = True

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the line and end the process with the error's exit status."""
        from shoal.trainer.process.crash_report import report_crash  # rare

        report_crash(self, kind, error, trace)


def explain_refusals(start: Start) -> Start:
    """Decorate `shoal.parallelize`: its errors name arguments, and leave no folder behind."""

    @wraps(start)
    def call(*given: Any, folder: str | Path | None = None, **named: Any) -> Any:
        paths = [Path(folder), *Path(folder).parents] if isinstance(folder, str | Path) else []
        missing = [path for path in paths if not os.path.lexists(path)]
        open_starts.append(missing)
        try:
            return start(*given, folder=folder, **named)
        except Exception as error:
            from shoal.trainer.process.crash_report import explain_refusal

            explain_refusal(error, given, named, missing)
            raise
        finally:
            open_starts.pop()

    return cast("Start", call)
