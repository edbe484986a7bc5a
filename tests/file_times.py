"""How long each test file takes, and how a suite compares with the one of commit 3070ad02.

    python tests/file_times.py            after `make test`: the files, the costliest first
    python tests/file_times.py --ratio    then twelve files of 3070ad02 on this machine (≤ 5 minutes),
                                          and the suite's CPU seconds relative to 3070ad02's
    … --keep                              writes proof/results/test-seconds.json (with `--ratio`: the
                                          twelve files, as this machine ran them, beside the table
                                          of 3070ad02, whose machine this must be)

Every session of pytest leaves build/test-times/PID.json: per file the wall seconds, the CPU seconds of
user code and of the kernel. They count the session's process, its descendants that ended and were
waited for, and those that live on (worlds of tests/worlds). They do not count the start of pytest and
its collection, ruff, mypy, import-linter, and the installation. SHOAL_TIME_TESTS=1 times each test
instead of each file.

The ratio is independent of the machine's speed:

    ratio = CPU s of this suite / (CPU s of 3070ad02's suite, as committed × twelve here / twelve then)

The twelve files run in a worktree of 3070ad02 below build/, with its own tests and its own source: the
worktree has an environment whose only packages are the worktree's `src` and this environment's
site-packages. Any process that a test starts by `sys.executable` imports from there, whatever its
environment variables are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "test-times"
EACH_TEST = bool(os.environ.get("SHOAL_TIME_TESTS"))
KEPT = ROOT / "proof" / "results" / "test-seconds.json"

BASE = "3070ad02"
"""The commit whose suite is the measure."""
BASE_TABLE = ROOT / "proof" / "results" / f"test-seconds-{BASE}.json"
TWELVE = (
    (
        *("tests/worlds/test_equality.py", "tests/worlds/test_expert.py"),
        *("tests/worlds/test_planted_bugs.py", "tests/worlds/test_technique.py"),
        *("tests/worlds/test_tensor.py", "tests/worlds/test_layout_resume.py"),
    ),
    (
        *("tests/parallel/test_place.py", "tests/parallel/spmd/test_split_block.py"),
        *("tests/simgpu/test_own_loop.py", "tests/trainer/test_examples.py"),
        *("tests/cli/test_plan.py", "tests/test_house.py"),
    ),
)
"""Of every lane, a tenth of the suite, with few waits. The two sessions run at the same time."""

Times = dict[str, list[float]]


class FileTimes:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.file = ""
        self.times: Times = {}
        self.before = (0.0, 0.0, 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        if (file := nodeid if EACH_TEST else nodeid.split("::")[0]) != self.file:
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


def read_times(folder: Path) -> Times:
    """Return the seconds per file of all sessions that left theirs in a folder."""
    found: Times = {}
    for path in folder.glob("*.json"):
        found.update(json.loads(path.read_text()))
    return found


def cpu_s(times: Times) -> float:
    """Return the CPU seconds of some files, of user code and of the kernel."""
    return sum(user + kernel for _, user, kernel in times.values())


def measured(times: Times) -> dict[str, object]:
    """Return what proof/results keeps of some files: where they ran, their sum and their seconds."""
    from importlib.metadata import version

    total = [sum(row[k] for row in times.values()) for k in range(3)]
    return {
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "columns": ["wall s", "CPU s of user code", "CPU s of the kernel"],
        "all": [round(seconds, 1) for seconds in total],
        "files": dict(sorted(times.items())),
    }


def make_environment(folder: Path, source: Path) -> Path:
    """Make an environment that imports `source`, and after it this environment's packages.

    No `.pth` file of this environment is read there, so this tree's own source is not found.

    Args:
        folder: where it is made.
        source: the folder that holds the package, `src` of a worktree.

    Returns:
        Its python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    packages = Path(found.stdout.strip())
    (packages / "base.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n")
    return python


def run_twelve() -> Times:
    """Run the twelve files of 3070ad02 in a worktree, and return their seconds.

    Raises:
        SystemExit: the worktree's environment imports another source, or a test is red: its
            seconds say nothing then.
    """
    tree = ROOT / "build" / f"tree-{BASE}"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=False)
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), BASE], check=True)
    try:
        python = make_environment(tree / ".venv", tree / "src")
        where = subprocess.run(
            [python, "-c", "import shoal; print(shoal.__file__)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if Path(where) != tree / "src" / "shoal" / "__init__.py":
            raise SystemExit(f"{python} imports {where}, not the source of {BASE}")
        sessions = [
            subprocess.Popen([python, "-m", "pytest", *files], cwd=tree) for files in TWELVE
        ]
        if any([session.wait() for session in sessions]):  # a list: both are waited for
            raise SystemExit(f"tests of {BASE} are red on this machine")
        return read_times(tree / "build" / "test-times")
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        shutil.rmtree(tree, ignore_errors=True)


def print_ratio(suite: Times, keep: bool) -> None:
    """Run the twelve files; print the suite's CPU seconds relative to 3070ad02's."""
    base = json.loads(BASE_TABLE.read_text())
    twelve = run_twelve()
    if keep:
        base["twelve"] = measured(twelve)
        BASE_TABLE.write_text(json.dumps(base, indent=1) + "\n")
    then_s, here_s = cpu_s(base["twelve"]["files"]), cpu_s(twelve)
    print(f"twelve files of {BASE}: {here_s:.1f} CPU s here, {then_s:.1f} as committed")
    total_s = cpu_s(base["files"])
    scaled_s = total_s * here_s / then_s
    print(f"its suite: {total_s:.0f} CPU s as committed, so {scaled_s:.0f} here")
    print(f"this suite: {cpu_s(suite):.0f} CPU s, ratio {cpu_s(suite) / scaled_s:.3f}")


def main(words: list[str]) -> None:
    """Print the files of all sessions."""
    found = read_times(FOLDER)
    print(f"{'seconds':>8} {'user':>7} {'kernel':>7}  file")
    for file, times in sorted(found.items(), key=lambda row: -row[1][1] - row[1][2]):
        print("{:8.1f} {:7.1f} {:7.1f}  {}".format(*times, file))
    total = [sum(times[k] for times in found.values()) for k in range(3)]
    print("{:8.1f} {:7.1f} {:7.1f}  {} files".format(*total, len(found)))
    if "--ratio" in words:
        print_ratio(found, "--keep" in words)
    elif "--keep" in words:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        record = {"commit": commit.stdout.strip(), **measured(found)}
        KEPT.write_text(json.dumps(record, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
