"""Watches, from outside of them, the ranks of a run that somebody else's launcher started.

    python -m shoal.cli.beside        started by rank 0 of the run (trainer/beside.py)

It makes a page for each rank (base/watch_page.py) and writes their paths as one line of JSON; it
reads one line, {"folder", "pids"}, and watches until those processes, or its input, have ended.
What hangs is written to the run folder's events.jsonl and to standard error. A loop of the user's
own may do anything between two steps, for as long as it likes: a rank that is busy is told, and
never ended. One that cannot come back by itself is killed, and the launcher ends or restarts the
others; those that are left after `REST_S` are killed too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.base.events import EventLog
from shoal.launch.hung import Hang
from shoal.launch.watch import EVERY_S, Watch
from shoal.view.events import event_text

REST_S = 10.0


class Other:
    """A process that is not this one's child, with what a watch asks of a worker."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._file = os.pidfd_open(pid)  # it stays this process, whoever has its number later

    @property
    def code(self) -> int | None:
        """None while it runs; how it ended its launcher knows."""
        return 0 if select.select([self._file], [], [], 0)[0] else None

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


def main() -> int:
    """Watch until the ranks have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the ranks, who may have to save
    count = int(sys.argv[1])
    watch = Watch(Path(), lambda event, **fields: None, math.inf, twice=True)
    sys.stdout.write(f"{json.dumps(watch.begin(count))}\n")
    sys.stdout.flush()
    asked = json.loads(sys.stdin.readline() or "{}")
    if not asked:
        return 0
    folder = Path(asked["folder"]) if asked["folder"] else None
    watch.folder, watch.emit = folder or Path(os.devnull), _telling(folder)
    watch.slow.emit = watch.emit
    try:
        ranks = [Other(rank, pid) for rank, pid in enumerate(asked["pids"])]
    except OSError:  # one has ended already
        return 0
    while any(rank.code is None for rank in ranks):
        if select.select([sys.stdin], [], [], EVERY_S)[0]:  # nobody writes: it has ended
            return 0
        if hang := watch.look(ranks):
            _end(ranks, hang)
            return 0
    return 0


def _telling(folder: Path | None) -> Callable[..., None]:
    """How it reports: an event, and a line that a person sees."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
    log = EventLog(folder / "events.jsonl" if folder else None, None)

    def emit(event: str, **fields: Any) -> None:
        log.emit(event, **fields)
        if text := event_text({"event": event, **fields}):
            sys.stderr.write(f"shoal: {text}\n")
            sys.stderr.flush()

    return emit


def _end(ranks: list[Other], hang: Hang) -> None:
    """Kill the rank that hangs; the others where the launcher has not ended them."""
    ranks[hang.rank].kill()
    until_s = time.monotonic() + REST_S
    while time.monotonic() < until_s and any(rank.code is None for rank in ranks):
        time.sleep(EVERY_S)
    for rank in ranks:
        rank.kill()


if __name__ == "__main__":
    sys.exit(main())
