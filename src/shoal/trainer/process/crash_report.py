"""Report of an error that ends a script; `excepthook.py` imports this module when one does.

line        for the screen, with the user's file and line
lost_peer   the error of a rank that lost a peer, which reports its own error
make_crash_recorder   for the run folder, from which `shoal diagnose` reads why a rank died
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.base.errors import ClusterError, ShoalError
from shoal.fabric import World
from shoal.wire import phases

if TYPE_CHECKING:
    from shoal.checkpoint.format.lease import RunLease
    from shoal.trainer.metrics_recorder import MetricsRecorder

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo on the ranks that wait for a dead one."""
TRACEBACK_LINES = 25


def format_error_line(error: ShoalError, trace: TracebackType | None, world: World | None) -> str:
    """Return `shoal: FILE:LINE: message` for an error, at the innermost line of user code."""
    from shoal.base.text.user_frames import user_line

    rank = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    place = user_line(trace)
    text = " ".join(str(error).split("\n"))
    return f"{rank}shoal: {f'{place}: ' if place else ''}{text}"


def convert_lost_peer_error(error: BaseException, world: World | None) -> ShoalError | None:
    """Return the one-line error of a rank whose peer is gone; None for any other error."""
    if world is None or world.size == 1 or not isinstance(error, RuntimeError):
        return None
    from shoal.fabric.collectives.link_failures import dead_link_text

    if told := dead_link_text(str(error)):
        return ClusterError(told)
    for words in LOST_PEER:
        if words in str(error):
            return ClusterError(f"another rank ended ({words}); its own line says why")
    return None


def close_watch_page() -> None:
    """Report in the watch page that this process ends and prints its own error."""
    if phases.page is not None:
        phases.page.close()


def make_crash_recorder(
    recorder: MetricsRecorder, lease: RunLease | None
) -> Callable[[BaseException | None, int], None]:
    """Return a function that records why a user's own loop ended, and releases the run folder.

    Returns:
        A function of (the error, exit status). Error None: another rank failed, and reports it
        itself.
    """

    def report(error: BaseException | None, code: int) -> None:
        if error is not None:
            from traceback import format_exception

            ours = isinstance(error, ShoalError)
            lines = [str(error)] if ours else "".join(format_exception(error)).splitlines()
            told = {"how": f"exit code {code}", "traceback": "\n".join(lines[-TRACEBACK_LINES:])}
            with contextlib.suppress(Exception):  # a listener of the user's may raise
                recorder.events.emit("worker_died", pid=os.getpid(), step=None, **told)
        if lease is not None:
            lease.release()

    return report
