"""An uncaught ShoalError in a user's script becomes one line with the user's own place in it.

    shoal: train.py:34: loss returned a mean: ranks with unequal token counts would weigh wrongly …

The exit status is the error's own (2: something to correct, 3: the numbers, 1: anything else).
Under several ranks each rank that raises prints its line, with `[rank 1]` before it; a rank whose
collective broke because a peer left says that in one line too, so that the peer's own line is not
buried. Everything else goes the ordinary way, under several ranks as far as the functions of
atexit: messages to peers that wait for this rank would keep it for ever. SHOAL_TRACEBACK=1 shows
tracebacks. `shoal.parallelize` installs the hook, unless somebody else has one (IPython, a
debugger); torch.distributed puts its own around the one it finds, which is taken for Python's.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from shoal.base.errors import ClusterError, ShoalError
from shoal.fabric import World

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says on the ranks that wait for one that is gone."""


def install() -> ShoalErrorHook:
    """Take over `sys.excepthook` if it is Python's own or torch's; gives the hook that is in place.

    Call it again after a process group was made: torch then has wrapped whatever was there.
    """
    current = sys.excepthook
    if isinstance(current, ShoalErrorHook):
        return current
    hook = ShoalErrorHook(current)
    if current is sys.__excepthook__ or current.__module__ == "torch.distributed.distributed_c10d":
        sys.excepthook = hook
    return hook


class ShoalErrorHook:
    """What Python calls with an exception that nobody caught.

    ordinary   the hook that shows everything else · world  the processes, once they are known
    """

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        self.ordinary = ordinary
        self.world: World | None = None

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the line and end the process with the error's exit status."""
        told = error if isinstance(error, ShoalError) else self._lost_peer(error)
        if told is None or os.environ.get("SHOAL_TRACEBACK"):
            self.ordinary(kind, error, trace)
        else:
            sys.stderr.write(self.line(told, trace) + "\n")
        if told is None:
            goes_on = isinstance(error, KeyboardInterrupt) or hasattr(sys, "ps1")
            if self.world is not None and self.world.size > 1 and not goes_on:
                # What was begun with peers may never end, and the teardown would wait for that.
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self.world is not None and self.world.size > 1:
            # The process group is alive and cannot be left: the peers are still in the step, or
            # gone. The interpreter's teardown would wait for gloo's threads or abort in them, and
            # lose the exit status. Peers then see a closed connection. atexit functions do not run.
            os._exit(told.exit_code)
        raise SystemExit(told.exit_code)  # CPython takes the status of a hook that raises this

    def _lost_peer(self, error: BaseException) -> ShoalError | None:
        several = self.world is not None and self.world.size > 1
        if several and isinstance(error, RuntimeError):
            from shoal.fabric.far_links import dead_link  # a run that goes well does without

            if told := dead_link(str(error)):
                return ClusterError(told)
            for words in LOST_PEER:
                if words in str(error):
                    return ClusterError(f"another rank ended ({words}); its own line says why")
        return None

    def line(self, error: ShoalError, trace: TracebackType | None) -> str:
        """`shoal: FILE:LINE: message`, the place being the innermost that is the user's."""
        from shoal.base.frames import user_place  # a run that goes well does without

        several = self.world is not None and self.world.size > 1
        rank = f"[rank {self.world.rank}] " if several and self.world is not None else ""
        place = user_place(trace)
        text = " ".join(str(error).split("\n"))
        return f"{rank}shoal: {f'{place}: ' if place else ''}{text}"
