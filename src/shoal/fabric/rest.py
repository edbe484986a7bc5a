"""Waits until gloo's own threads are at rest, since only then may the last reference to a group go.

A thread of gloo that has finished a transfer gives up what was sent, for which it needs Python's
lock. Whoever drops the last reference to the group waits for that thread; if it is a C++ object
(the reducer of DistributedDataParallel, for one) it holds the lock meanwhile, and both wait for
ever: 2 of 80 worlds whose model outlived the group (docs/lab-log.md, "A world that did not end").

The kernel tells who rests: a thread that sleeps in a wait without limit is never switched, one
that waits for Python's lock wakes every 5 ms, one that got no core is not asleep. Linux only;
elsewhere some time must do.
"""

from __future__ import annotations

import time
from pathlib import Path

LOOK_S, LIMIT_S = 0.012, 5.0
"""Longer than two of those 5 ms · how long is waited at most."""
RUNLOOP = "gloo_runloop"


def await_rest(tasks: Path = Path("/proc/self/task")) -> None:
    """Let gloo's threads end what they are in the middle of, Python's lock released meanwhile."""
    until_s = time.monotonic() + LIMIT_S
    before = _switches(tasks)
    while before:
        time.sleep(LOOK_S)
        now = _switches(tasks)
        if (now == before and None not in now.values()) or time.monotonic() > until_s:
            return
        before = now


def _switches(tasks: Path) -> dict[str, str | None]:
    """How often each of gloo's workers was switched; None of one that is not asleep."""
    found: dict[str, str | None] = {}
    for task in tasks.glob("*"):
        try:
            if RUNLOOP not in (task / "comm").read_text():
                continue
            lines = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        asleep = lines["State"].startswith("S")
        found[task.name] = lines["voluntary_ctxt_switches"] if asleep else None
    return found
