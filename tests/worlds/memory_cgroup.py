"""A memory cgroup of its own for a child process, where this machine lets us make one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
ENTER = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Cgroup:
    """A folder of the kernel's, and the names that its version has for what is asked of it."""

    folder: Path
    limit: str
    peak: str

    def run(self, words: Sequence[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
        """Run a Python command inside; nothing else ever enters."""
        command = [sys.executable, "-c", ENTER, str(self.folder / "cgroup.procs"), sys.executable]
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=deadline_s, check=False
        )

    @property
    def peak_bytes(self) -> int:
        """The most that its processes and their pages of files took at once."""
        return int((self.folder / self.peak).read_text())


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Cgroup | str]:
    """Give a cgroup with a limit; where there can be none, the reason."""
    made = _make(limit_bytes)
    try:
        yield made
    finally:
        for _ in range(50):  # a killed process leaves it a moment later
            try:
                if isinstance(made, Cgroup):
                    made.folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _make(limit_bytes: int) -> Cgroup | str:
    name = f"shoal-test-{os.getpid()}"
    version_1 = ROOT / "memory"
    try:
        if version_1.is_dir():
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            paths = [line.split(":", 2) for line in lines]
            own = next(path for _, names, path in paths if "memory" in names.split(","))
            folder = version_1 / own.lstrip("/") / name
            made = Cgroup(folder, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        elif "memory" in (ROOT / "cgroup.subtree_control").read_text().split():
            made = Cgroup(ROOT / name, "memory.max", "memory.peak")
        else:
            return "the root hands no memory controller on"
        made.folder.mkdir()
        (made.folder / made.limit).write_text(str(limit_bytes))
    except (OSError, StopIteration) as failure:
        return f"no cgroup can be made here: {failure!r}"
    return made
