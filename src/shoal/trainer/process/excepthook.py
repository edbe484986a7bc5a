"""Exception hook that prints an uncaught ShoalError as one line with the user's file and line.

    shoal: train.py:34: loss returned a mean: ranks with unequal token counts would weigh wrongly …

The exit status is the error's own (2: something to correct, 3: the numbers, 1: anything else).
With several ranks each rank that raises prints its line, with `[rank 1]` before it. A rank whose
collective broke because a peer left prints one line too, so that it does not bury the peer's own
line. Every other error goes to the ordinary hook. With several ranks the process then ends after
the functions of atexit: messages to peers that wait for this rank would block it for ever.
SHOAL_TRACEBACK=1 shows tracebacks. `shoal.parallelize` installs the hook, unless another one is
installed (IPython, a debugger). torch.distributed wraps the hook that it finds; such a wrapper
counts as Python's.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.standard_streams import flush_streams, write_error
from shoal.fabric import World


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
        make_crash_recorder: records (the error, exit status) in the run folder; error None: another
        rank
            failed.
    """

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        self.ordinary = ordinary
        self.world: World | None = None
        self.last_word: Callable[[BaseException | None, int], None] = lambda error, code: None

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the line and end the process with the error's exit status."""
        from shoal.trainer.process.crash_report import (  # rare
            close_watch_page,
            convert_lost_peer_error,
            format_error_line,
        )

        told = (
            error if isinstance(error, ShoalError) else convert_lost_peer_error(error, self.world)
        )
        if told is None or os.environ.get("SHOAL_TRACEBACK"):
            self.ordinary(kind, error, trace)
        else:
            write_error(format_error_line(told, trace, self.world))
        asked, prompt = isinstance(error, KeyboardInterrupt), hasattr(sys, "ps1")
        if not prompt:
            close_watch_page()
            own = error if told in (None, error) and not asked else None
            self.last_word(own, told.exit_code if told is not None else 1)
        if told is None:
            goes_on = asked or prompt
            if self.world is not None and self.world.size > 1 and not goes_on:
                # Communication with peers may never end, and the teardown would wait for it.
                atexit._run_exitfuncs()
                flush_streams()
                os._exit(1)
            return
        flush_streams()
        if self.world is not None and self.world.size > 1:
            # The process group is alive and cannot be left: the peers are still in the step, or
            # gone. The interpreter's teardown would wait for gloo's threads or abort in them, and
            # lose the exit status. Peers then see a closed connection. atexit functions do not run.
            os._exit(told.exit_code)
        raise SystemExit(told.exit_code)  # CPython takes the status of a hook that raises this
