"""Runs of the real command in which one fault happens (faulty.py), and what must be true after it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli_run import CommandLine, trajectory
from shoal.view.diagnose import RunFinding, diagnose

HERE = Path(__file__).parent
ARGUMENTS = [
    "model.build=faulty:build", "data.source=faulty:data", "train.batch=8", "train.micro_batch=2",
    "train.steps=24", "checkpoint.every=4", "precision.compute=fp32", "train.prove=off",
    "launch.patience_s=0", "launch.processes=2",
]  # fmt: skip
AFTER = {"forward": 34, "data": 70}
"""Passes, samples of one rank: in the middle of the run."""


def command(
    folder: Path, asked: dict[str, Any] | None, *arguments: str, **settings: Any
) -> CommandLine:
    """A run in which something goes wrong; None: nothing. The settings are of `CommandLine`."""
    for name in ("hanging.py", "faulty.py"):
        shutil.copy(HERE / name, folder)
    place = (asked or {}).get("place", "")
    told = {"rank": 1, "after": AFTER.get(place, 0), **(asked or {"place": ""})}
    # Who has saved by then goes on from that save.
    told.setdefault("saved", place in AFTER and told["after"] >= AFTER[place])
    for name in ("hang.json", "fault.json"):
        (folder / name).write_text(json.dumps(told))
    if not any(word.startswith("layout.") for word in arguments):
        arguments = ("layout.strategy=ddp", *arguments)  # `auto` may choose another each time
    return CommandLine(folder, *ARGUMENTS, *arguments, **settings)


def wrong(run: CommandLine) -> list[RunFinding]:
    """What is wrong with the run, by its folder."""
    return [one for one in diagnose(run.run) if not one.advice]


def nothing_left(run: CommandLine) -> None:
    """No process of the run lives, nobody holds its folder."""
    until_s = time.monotonic() + 5
    pids = {event["pid"] for event in run.events("worker_started")}
    while pids := {pid for pid in pids if lives(pid)}:
        assert time.monotonic() < until_s, f"{pids} live on"
        time.sleep(0.05)
    assert not (run.run / "owner.json").exists()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def same(run: CommandLine, unbroken: list[Any], *, exactly: bool) -> None:
    """Every step once, with the samples and the losses of the run that nothing happened to."""
    rows = trajectory(run.run)
    assert [row[0] for row in rows] == [row[0] for row in unbroken]
    assert [row[3] for row in rows] == [row[3] for row in unbroken]
    if exactly:
        assert rows == unbroken
    for ours, theirs in zip(rows, unbroken, strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    restarts = run.events("restarting")
    made = [event["saved"] for event in restarts]
    assert all(saved is not None and saved % 4 == 0 for saved in made), "from a checkpoint"
