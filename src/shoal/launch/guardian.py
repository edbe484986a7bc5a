"""Guardian process that outlives the supervisor for a moment and kills its leftover processes.

The parent-death signal reaches the supervisor's own children only: a loader process that a worker
started would survive a kill of supervisor and worker. So this script holds the reading end of a
pipe that only the supervisor can write to.

Protocol, one line each on standard input:
  +PGID    guard this process group
  -PGID    it is gone; forget it
At the end of input the supervisor finished or died: every group still listed is killed.

Run by file name with `python -I -S`, so it imports nothing of Shoal and starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def collect_leftover_groups(lines: Iterable[str]) -> set[int]:
    """Follow the protocol to its end; return the process groups that must still be killed.

    >>> collect_leftover_groups(["+12", "+13", "-12"])
    {13}
    """
    groups: set[int] = set()
    for line in lines:
        sign, number = line[0], int(line[1:])
        if sign == "+":
            groups.add(number)
        else:
            groups.discard(number)
    return groups


def main() -> None:
    """Guard until standard input ends."""
    # A scheduler signals all processes of a job at once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for group in collect_leftover_groups(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # gone, or none of ours any more
            continue


if __name__ == "__main__":
    main()
