"""CPU seconds of `shoal train` from exec to step 0, by what it was busy with.

All processes of the command count, the finished ones too: user and system time of the whole tree,
read ten times a second, so a phase that is shorter may be missed and counts to its neighbour.
`startup.py --command` prints the row; also of an older source, which has no phases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

MODEL = ("model.dim=768", "model.layers=11", "data.sequence=256")
DATA = ("data.source=text:{docs}/*.md", "data.tokenizer=bpe:8192")
RUN = ("layout.strategy=ddp", "launch.processes=2", "train.batch=8", "train.micro_batch=2")
LOOK_S = 0.1

STARTS = {
    "demo": ("run.name=start",),
    "tp2 pp2": ("layout.tp=2", "layout.pp=2", "launch.processes=4", *DATA),
}
"""Commands whose starts are compared with another checkout's: words of `shoal train`."""


def start_of_command(
    source: Path,
    cache: Path,
    deadline_s: float,
    asked: Sequence[str] = (*MODEL, *DATA, *RUN),
    until: str = "compute_started",
) -> dict[str, Any]:
    """Start a command and kill it when step 0 is about to run, or its first step is committed.

    source   a checkout whose `src` is measured · cache  SHOAL_CACHE, kept between starts
    asked    its words; default: 76 M parameters on ddp × 2
    until    an event, or `step`
    Gives    wall_s, cpu_s, and cpu_s by phase, in the order in which they came
    """
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(__file__).resolve().parent.parent / "docs"
        words = [word.format(docs=docs) for word in asked]
        command = [sys.executable, "-m", "shoal", "train", *words, "train.steps=2"]
        began_s = time.monotonic()
        with (Path(folder) / "out").open("w") as out:
            process = subprocess.Popen(
                [*command, f"run.folder={folder}", "run.name=start"],
                env={
                    **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
                    "PYTHONPATH": str(source / "src"),
                    "SHOAL_CACHE": str(cache),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            root, run = psutil.Process(process.pid), Path(folder) / "start"
            return _watch(root, run, began_s, deadline_s, until)
        finally:
            for one in _tree(psutil.Process(process.pid)):
                one.kill()
            process.wait()


def first_step_s(source: Path, words: Sequence[str], deadline_s: float) -> float:
    """CPU seconds from exec to the first committed step, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        found = start_of_command(source, Path(cache), deadline_s, words, "step")
    return float(found["cpu_s"])


def import_torch_s() -> float:
    """CPU seconds of a process that imports torch and ends."""
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def _watch(
    root: psutil.Process, run: Path, began_s: float, deadline_s: float, until: str
) -> dict[str, Any]:
    phases: dict[str, float] = {}
    before_s, name = 0.0, "command line"
    while True:
        cpu_s = _cpu_s(root)
        phases[name] = phases.get(name, 0.0) + cpu_s - before_s
        before_s, wall_s = cpu_s, time.monotonic() - began_s
        file, sign = ("metrics.jsonl", '"loss"') if until == "step" else ("events.jsonl", until)
        if (run / file).exists() and sign in (run / file).read_text():
            return {"wall_s": wall_s, "cpu_s": cpu_s, "cpu_s_by_phase": phases}
        if wall_s > deadline_s or root.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"no step 0 after {wall_s:.0f} s")
        name = _phase(run / "phase.json") or name
        time.sleep(LOOK_S)


def _phase(path: Path) -> str:
    try:
        return "/".join(row["name"] for row in json.loads(path.read_text())["phases"])
    except (OSError, ValueError):
        return ""


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_s(root: psutil.Process) -> float:
    total = 0.0
    for process in _tree(root):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue
    return total
