"""What an error that ends a script says and leaves: loaded by `excepthook.py` when one does.

line        for the screen, with the user's own place
lost_peer   whether it is another rank's fault, who tells that itself
last_word   for the run folder, from which `shoal diagnose` reads who died of what
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
    from shoal.trainer.metrics_recorder import Recorder

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says on the ranks that wait for one that is gone."""
TRACEBACK_LINES = 25


def line(error: ShoalError, trace: TracebackType | None, world: World | None) -> str:
    """`shoal: FILE:LINE: message`, the place being the innermost that is the user's."""
    from shoal.base.text.user_frames import user_place

    rank = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    place = user_place(trace)
    text = " ".join(str(error).split("\n"))
    return f"{rank}shoal: {f'{place}: ' if place else ''}{text}"


def lost_peer(error: BaseException, world: World | None) -> ShoalError | None:
    """The error of a rank that waited for one that is gone, in one line; None for any other."""
    if world is None or world.size == 1 or not isinstance(error, RuntimeError):
        return None
    from shoal.fabric.collectives.link_failures import dead_link

    if told := dead_link(str(error)):
        return ClusterError(told)
    for words in LOST_PEER:
        if words in str(error):
            return ClusterError(f"another rank ended ({words}); its own line says why")
    return None


def leave_page() -> None:
    """Tell who watches this process that it ends, and with words of its own."""
    if phases.page is not None:
        phases.page.leave()


def last_word(
    recorder: Recorder, lease: RunLease | None
) -> Callable[[BaseException | None, int], None]:
    """What an error that ends a loop of the user's own leaves: who died of what, and a free folder.

    Returns:
        a function of (the error, exit status); None: another rank's fault, who tells itself.
    """

    def tell(error: BaseException | None, code: int) -> None:
        if error is not None:
            from traceback import format_exception

            ours = isinstance(error, ShoalError)
            lines = [str(error)] if ours else "".join(format_exception(error)).splitlines()
            told = {"how": f"exit code {code}", "traceback": "\n".join(lines[-TRACEBACK_LINES:])}
            with contextlib.suppress(Exception):  # a hook of the user's hears it too
                recorder.events.emit("worker_died", pid=os.getpid(), step=None, **told)
        if lease is not None:
            lease.release()

    return tell
