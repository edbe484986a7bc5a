"""Records of the processor time of a node's ranks: `processes.jsonl`, a line every 5 seconds.

    {"time_s": 1764400000.0, "host": "a", "ranks": [{"rank": 0, "pid": 4711, "cpu_s": 81.25,
     "run_delay_s": 12.5}]}

`cpu_s` is the time for which the main thread of a rank ran on a processor since its start, and
`run_delay_s` the time for which it could have run and waited for a processor. On an idle machine
the second is about zero. On a busy one, or below a limit of its container, it is the time by which
the rank's own work gets longer. The watch reads both from the kernel, so a rank pays nothing.

Source   Linux, Documentation/scheduler/sched-stats.rst, `/proc/<pid>/schedstat`
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, Protocol

from shoal.base.runlog.events import append_line
from shoal.base.runlog.folder_owner import FolderOwner
from shoal.base.runlog.thin_lines import thin_lines

PROCESSES_FILE = "processes.jsonl"
EVERY_S = 5.0
FILE_BYTES = 4 << 20
"""Size above which older lines are thinned out."""
NANOSECOND_S = 1e-9


class RankProcess(Protocol):
    """Process of a rank on this machine."""

    @property
    def rank(self) -> int:
        """Return the rank."""

    @property
    def pid(self) -> int:
        """Return the process id."""


def read_processor_times_s(pid: int) -> tuple[float, float] | None:
    """Return the seconds for which a main thread ran, and waited for a processor.

    None if the process is gone, or the kernel does not count.

    >>> times_s = read_processor_times_s(os.getpid())
    >>> times_s is None or times_s[0] > 0
    True
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        ran, waited = int(fields[0]), int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    # A kernel without these counters has the file, with zeros in it.
    return (ran * NANOSECOND_S, waited * NANOSECOND_S) if ran else None


class ProcessRecordFile:
    """File of the processor times of the ranks on this machine.

    Args:
        folder: the run's; without one nothing is written.
        every_s: seconds between two lines.
    """

    def __init__(self, folder: Path, every_s: float = EVERY_S) -> None:
        self.folder, self.every_s, self._owner = folder, every_s, FolderOwner(folder)
        self._next_s = -math.inf

    def append_sample(self, processes: Iterable[RankProcess], own: Container[int]) -> None:
        """Append a line if it is time; a full disk must not stop the run.

        Args:
            processes: of all ranks that run.
            own: ranks on this machine; a process id of another machine means nothing here.
        """
        now_s = time.monotonic()
        if now_s < self._next_s or not self.folder.is_dir():
            return
        self._next_s = now_s + self.every_s
        ranks: list[dict[str, Any]] = []
        for one in processes:
            if one.rank in own and (times_s := read_processor_times_s(one.pid)) is not None:
                cpu_s, delay_s = (round(seconds, 6) for seconds in times_s)
                ranks.append(
                    {"rank": one.rank, "pid": one.pid, "cpu_s": cpu_s, "run_delay_s": delay_s}
                )
        if not ranks:
            return
        with contextlib.suppress(OSError):
            path = self._owner.current_path() / PROCESSES_FILE
            host = os.uname().nodename
            append_line(path, {"time_s": time.time(), "host": host, "ranks": ranks})
            thin_lines(path, FILE_BYTES, "host")
