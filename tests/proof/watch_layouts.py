"""`shoal watch` in tmux, of real runs in five layouts: start, training, validation, hang, kill, end.

    python tests/proof/watch_layouts.py [--only ddp,islands] [--screens FOLDER]

Each run trains the demo's model on the standard library's sources. One rank is stopped for as long
as the watchdog needs to call it a hang, one is killed after the restart; then the run ends. Three
terminals (80 × 24, 120 × 40, 200 × 60) show it from before its folder exists. Their screens are read
in each phase: a phase must stand there in words, no line may be wider than its terminal, and no
traceback may show. The processor seconds of each `shoal watch`, after its first screen, are divided
by the wall time; no file below the run may be open for writing in it. --screens keeps each screen
as a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks"), str(HERE.parent / "worlds"), str(HERE.parent)]
sys.path[:0] = [str(HERE.parent / "view")]

from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402
from watch_cost import MOST, processor_s  # noqa: E402

from cli_run import lines, outside  # noqa: E402

CACHE = ROOT / "build" / "watch-cache"
SIZES = ((80, 24), (120, 40), (200, 60))
DEADLINE_S = 420.0
SETTLE_S = 4.0
"""Seconds after a phase begins until the screens are read; a screen is at most half as old."""
WORDS = [
    "model.dim=32", "model.layers=4", "data.sequence=64", "train.batch=8", "train.micro_batch=1",
    "train.steps=480", "train.validate_every=20", "train.validate_samples=8", "checkpoint.every=10",
    "train.prove=off", "launch.patience_s=3", "precision.compute=fp32", "run.name=run",
]  # fmt: skip
LAYOUTS: dict[str, tuple[list[str], str]] = {
    # arguments · the folder below the run's with the processes of the rank that is hit
    "ddp": (["layout.strategy=ddp", "launch.processes=2"], ""),
    "fsdp": (["layout.strategy=fsdp", "launch.processes=2"], ""),
    "pp": (["layout.pp=2", "launch.processes=2"], ""),
    "islands": (
        ["islands.method=diloco", "islands.count=2", "islands.period=5", "launch.processes=1"],
        "island-1",
    ),
    "servers": (
        ["layout.strategy=parameter-server", "layout.servers=1", "launch.processes=3"],
        "",
    ),
}
PHASES: dict[str, tuple[str, ...]] = {
    # phase → words of which one must be on each screen
    "waiting": ("waiting for",),
    "start": ("starting", "running"),
    "training": ("running",),
    "validation": ("val ",),
    "hang": ("hang", "hung", "stopped (SIGSTOP)", "silent", "no rank goes on"),
    "restarted": ("again", "restart", "attempt", "starting", "running"),
    "killed": ("killed by SIGKILL", "dead", "restart", "again"),
    "end": ("ended",),
}


class Watches:
    """`shoal watch` of one run in terminals of three sizes, in a tmux server of its own."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.socket, self.run = str(folder / "tmux.sock"), run
        command = f"exec {sys.executable} -m shoal watch {run}"
        for columns, rows in SIZES:
            self._tmux(
                *("-f", "/dev/null", "new-session", "-d", "-s", f"w{columns}"),
                *("-x", str(columns), "-y", str(rows), command),
                env={**outside(), "LANG": "C.UTF-8"},
            )
        self._tmux("set-option", "-g", "status", "off")
        self.pids = [
            int(self._tmux("list-panes", "-t", f"w{columns}", "-F", "#{pane_pid}"))
            for columns, _ in SIZES
        ]
        self.began: list[tuple[float, float]] = []

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.socket, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise SystemExit(f"tmux {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def screens(self) -> dict[str, list[str]]:
        """Return the lines on each terminal, without blanks at the end."""
        return {
            f"{columns}x{rows}": [
                line.rstrip()
                for line in self._tmux("capture-pane", "-p", "-t", f"w{columns}").splitlines()
            ]
            for columns, rows in SIZES
        }

    def start_clock(self) -> None:
        """Begin to count processor seconds."""
        self.began = [(time.monotonic(), processor_s(pid)) for pid in self.pids]

    def shares(self) -> list[float]:
        """Return the processor seconds of each watch over the wall time."""
        now_s = time.monotonic()
        return [
            round((processor_s(pid) - cpu_s) / (now_s - at_s), 4)
            for pid, (at_s, cpu_s) in zip(self.pids, self.began, strict=True)
        ]

    def open_for_writing(self) -> list[str]:
        """Return files below the run that a watch holds open for writing."""
        found = []
        for pid in self.pids:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    name, info = os.readlink(link), Path(f"/proc/{pid}/fdinfo/{link.name}")
                    flags = int(re.findall(r"flags:\s*(\d+)", info.read_text())[0], 8)
                except OSError:
                    continue  # closed meanwhile
                if name.startswith(str(self.run)) and flags & os.O_ACCMODE != os.O_RDONLY:
                    found.append(name)
        return found

    def close(self) -> None:
        """End all terminals."""
        self._tmux("kill-server")


@contextmanager
def trained(folder: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A `shoal train` in a folder, ended at the latest with the block."""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "train", *WORDS, *words],
            cwd=folder,
            env={**outside(), "SHOAL_CACHE": str(CACHE)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(process: subprocess.Popen[bytes], ready: Callable[[], object], what: str) -> None:
    """Wait until something is true, or end the program with what it waited for."""
    until_s = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > until_s or (process.poll() is not None and not ready()):
            raise AssertionError(f"no {what}: exit status {process.poll()}")
        time.sleep(0.1)


def watch(layout: str, folder: Path, keep: Callable[[str, dict[str, list[str]]], None]) -> Any:
    """Watch one run from before its start until after its end."""
    words, part = LAYOUTS[layout]
    run = folder / "runs" / "run"
    hit = run / part
    watches = Watches(folder, run)
    seen: dict[str, dict[str, list[str]]] = {}
    written: list[str] = []

    def look(phase: str, settle_s: float = SETTLE_S) -> None:
        time.sleep(settle_s)
        seen[phase] = watches.screens()
        written.extend(watches.open_for_writing())
        keep(phase, seen[phase])

    def events(name: str, of: Path = hit) -> list[dict[str, Any]]:
        return [one for one in lines(of / "events.jsonl") if one["event"] == name]

    def has_validated() -> bool:
        """Of islands the first one validates."""
        return any(events("validated", of) for of in (run, *run.glob("island-*")))

    def pid() -> int:
        newest = {one["rank"]: one["pid"] for one in events("worker_started")}
        return int(newest[max(newest)])

    def steps() -> int:
        return len(lines(hit / "metrics.jsonl"))

    def steps_go_on(after: int) -> Callable[[], bool]:
        return lambda: steps() > after

    try:
        time.sleep(SETTLE_S)
        look("waiting")
        watches.start_clock()
        with trained(folder, words) as process:
            wait_for(process, lambda: (run / "events.jsonl").exists(), "folder")
            look("start", 1.5)
            wait_for(process, lambda: steps() >= 8, "steps")
            look("training")
            wait_for(process, has_validated, "validation")
            look("validation")
            os.kill(pid(), signal.SIGSTOP)
            wait_for(process, lambda: events("hang"), "hang")
            look("hang", 1.0)
            wait_for(process, lambda: len(events("worker_started")) > 1, "restart")
            wait_for(process, steps_go_on(steps()), "steps after the restart")
            look("restarted")
            os.kill(pid(), signal.SIGKILL)
            wait_for(process, lambda: events("worker_died"), "death")
            look("killed", 1.5)
            wait_for(process, lambda: process.poll() is not None, "end")
            code = process.returncode
            look("end")
        shares = watches.shares()
    finally:
        watches.close()
    return {
        "exit_status": code,
        "steps": steps(),
        "share_of_a_core": shares,
        "open_for_writing": sorted(set(written)),
        "screens": {phase: screens["80x24"] for phase, screens in seen.items()},
        "wrong": judge(seen, code, shares, written),
    }


def judge(
    seen: dict[str, dict[str, list[str]]], code: int, shares: list[float], written: list[str]
) -> list[str]:
    """Return what is wrong with the screens of a run; [] for nothing."""
    wrong = [f"exit status {code}"] if code else []
    wrong += [f"{share:.1%} of a core" for share in shares if share > MOST]
    wrong += [f"{name} open for writing" for name in sorted(set(written))]
    for phase, screens in seen.items():
        for (columns, rows), text in zip(SIZES, screens.values(), strict=True):
            where = f"{phase} at {columns} × {rows}"
            if len(text) > rows or any(len(line) > columns for line in text):
                wrong.append(f"{where}: larger than the terminal")
            if "Traceback" in "\n".join(text):
                wrong.append(f"{where}: a traceback")
            if not any(word in "\n".join(text) for word in PHASES[phase]):
                wrong.append(f"{where}: none of {', '.join(PHASES[phase])}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--screens", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "proof/results/watch-layouts.json")
    asked = parser.parse_args()
    if shutil.which("tmux") is None:
        raise SystemExit("tmux: not installed; try: apt-get install tmux")
    names = [name for name in asked.only.split(",") if name] or list(LAYOUTS)
    rows: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="watch-") as place:

            def keep(phase: str, screens: dict[str, list[str]], name: str = name) -> None:
                for size, text in screens.items() if asked.screens else ():
                    path = asked.screens / f"{name}-{phase}-{size}.txt"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("\n".join(text) + "\n")

            try:
                rows[name] = watch(name, Path(place), keep)
            except AssertionError as failure:
                output = (Path(place) / "output.txt").read_text(errors="replace")
                rows[name] = {"wrong": [str(failure)], "output": output[-3000:].splitlines()}
        told = {key: rows[name].get(key) for key in ("wrong", "share_of_a_core", "steps")}
        print(json.dumps({name: told}), flush=True)
    result = {"rows": rows, "sizes": [f"{c}x{r}" for c, r in SIZES], "most": MOST}
    result |= {"source": source_hash(), "machine": machine()}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
