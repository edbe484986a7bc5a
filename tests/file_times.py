"""How long each test file took: wall time, CPU time of user code and of the kernel.

Every session of pytest leaves build/test-times/PID.json; `python tests/file_times.py` adds up what
the sessions of one `make test` left, the costliest first, and with `--keep` writes them to
docs/proof/test-seconds.json. CPU counts this process, those that ended,
and those that live on and serve later files (worlds of tests/worlds). Nothing is judged by it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "test-times"
KEPT = ROOT / "docs" / "proof" / "test-seconds.json"


class FileTimes:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.file = ""
        self.times: dict[str, list[float]] = {}
        self.before = (0.0, 0.0, 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        if (file := nodeid.split("::")[0]) != self.file:
            self._end()
            self.file, self.before = file, spent()

    def pytest_sessionfinish(self) -> None:
        """The last test has ended."""
        self._end()
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(self.times, indent=1))

    def _end(self) -> None:
        if self.file:
            since = [now - before for now, before in zip(spent(), self.before, strict=True)]
            total = self.times.setdefault(self.file, [0.0, 0.0, 0.0])
            self.times[self.file] = [round(a + b, 2) for a, b in zip(total, since, strict=True)]


def spent() -> tuple[float, float, float]:
    """(now, CPU seconds of user code, of the kernel) of this process and all that it started."""
    own = os.times()
    user, system = own.user + own.children_user, own.system + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            theirs = child.cpu_times()
        except psutil.Error:
            continue
        user += theirs.user + theirs.children_user
        system += theirs.system + theirs.children_system
    return time.monotonic(), user, system


def main() -> None:
    """Print the files of all sessions."""
    found: dict[str, list[float]] = {}
    for path in FOLDER.glob("*.json"):
        found.update(json.loads(path.read_text()))
    print(f"{'seconds':>8} {'user':>7} {'kernel':>7}  file")
    for file, times in sorted(found.items(), key=lambda row: -row[1][1] - row[1][2]):
        print("{:8.1f} {:7.1f} {:7.1f}  {}".format(*times, file))
    total = [sum(times[k] for times in found.values()) for k in range(3)]
    print("{:8.1f} {:7.1f} {:7.1f}  {} files".format(*total, len(found)))
    if "--keep" in sys.argv[1:]:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        record = {
            "commit": commit.stdout.strip(),
            "machine": f"{os.cpu_count()} cores, {_processor()}",
            "columns": ["wall s", "CPU s of user code", "CPU s of the kernel"],
            "all": [round(seconds, 1) for seconds in total],
            "files": dict(sorted(found.items())),
        }
        KEPT.write_text(json.dumps(record, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


if __name__ == "__main__":
    sys.exit(main())
