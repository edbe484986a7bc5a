"""`torchrun --nnodes=1:2`: a node is lost, comes back, or is cut off, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli_run import lines
from elastic import HERE, Nodes, children, rounds, wait_for
from forks import shared
from netns import Forbidden, skip
from shoal.fabric.collectives.link_failures import ASK_S, LINK_S

LOOP = str(HERE / "elastic_loop.py")
WHAT = "nodes that come and go NOT TESTED"


def taken(found: list[dict[str, Any]]) -> dict[int, tuple[float, list[int]]]:
    """(loss, samples of all ranks) of each step, as the run that is left took it."""
    kept: dict[int, tuple[float, list[int]]] = {}
    for one in found:
        if one["rank"] == 0:
            kept = {step: row for step, row in kept.items() if step <= one["start"]}
            rest = [two for two in found if two["meets"] == one["meets"]]
            for row in one["steps"]:
                same = [two for of in rest for two in of["steps"] if two["step"] == row["step"]]
                kept[row["step"]] = (row["loss"], sorted(n for two in same for n in two["samples"]))
    return kept


def unbroken(folder: Path, steps: int) -> dict[int, tuple[float, list[int]]]:
    """The same of one process that nothing happens to."""
    logs = folder / "alone"
    logs.mkdir()
    words = (LOOP, str(steps), "0", str(logs), str(folder / "alone-run"))
    done = shared().run(*words, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return taken(rounds(logs))


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_link_goes_down_for_ever(tmp_path: Path, killed: bool) -> None:
    """Of `killed`, a node is killed before that, and comes back."""
    steps, logs = 64 if killed else 24, tmp_path / "logs"
    logs.mkdir()
    command = [LOOP, str(steps), "0.3", str(logs), str(tmp_path / "run")]
    try:
        nodes = Nodes(tmp_path, command)
    except Forbidden as why:
        skip(WHAT, str(why))
    with nodes:

        def told() -> str:
            return f"{rounds(logs)}\n{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        def began(size: int, count: int) -> bool:
            """Whether so many processes of worlds of this size took steps."""
            worlds = [one for one in rounds(logs) if one["size"] == size and len(one["steps"]) > 1]
            return len(worlds) >= count

        nodes.start(0)
        nodes.start(1)
        wait_for(lambda: any(len(one["steps"]) > 5 for one in rounds(logs)), 90, told)
        if killed:
            nodes.kill(1)
            wait_for(lambda: began(1, 1), 60, told)
            nodes.start(1)
            wait_for(lambda: began(2, 4), 60, told)
        nodes.net.cut(1)  # nobody was killed and nothing is closed: the kernel alone can tell
        (logs / "fast").touch()
        began_s = time.monotonic()
        here, there = (f"nothing comes from {nodes.net.addresses[node]}" for node in (1, 0))
        wait_for(lambda: here in nodes.said(0), LINK_S + 2 * ASK_S, told)
        assert time.monotonic() - began_s > ASK_S, "a link that is down for a moment is waited for"
        left = children(nodes.agents[0].pid)
        assert nodes.agents[0].wait(90) == 0, told()
        # What the agent left is ended by its own watch, and gone once the first process reaped it.
        wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in left), 60, told)
        # The other agent waits for the store much longer; the rank that was cut off does not.
        wait_for(lambda: there in nodes.said(1), 2 * ASK_S, told)
    found = rounds(logs)
    assert [one["size"] for one in found] == [2, 2, 1] * (1 + killed)
    starts = [one["start"] for one in found]
    assert starts == sorted(starts)
    assert 0 == starts[0] == starts[1] < starts[2], "from the newest checkpoint"
    assert starts[-1] < steps
    taken_here, alone = taken(found), unbroken(tmp_path, steps)
    assert sorted(taken_here) == sorted(alone) == list(range(1, steps + 1))
    for step, (loss, seen) in alone.items():
        assert taken_here[step] == (pytest.approx(loss, rel=1e-12), seen), step
    epoch = sorted(n for step in range(1, 9) for n in taken_here[step][1])
    assert epoch == list(range(64)), "every sample once"


SLOWLY = """
import time

class Slowly:
    def __init__(self, folder):
        pass

    def __call__(self, event):
        if "loss" in event and event["step"] < 40:
            time.sleep(0.5)
"""
WORDS = [
    "data.source=synthetic", "model.dim=32", "model.layers=2", "model.heads=2", "train.batch=8",
    "train.micro_batch=1", "train.steps=60", "precision.compute=fp64", "train.prove=off",
    "checkpoint.every=4",
]  # fmt: skip


@pytest.mark.proof
def test_a_run_of_ours_goes_on_by_its_jobs_name(tmp_path: Path) -> None:
    """Nobody names the folder, and the node that comes back has counted no restart."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    command = ["-m", "shoal", "train", *WORDS, "train.on=['slowly:Slowly']"]
    run = tmp_path / "runs" / "job-job"
    try:
        nodes = Nodes(tmp_path, command)
    except Forbidden as why:
        skip(WHAT, str(why))
    with nodes:

        def told() -> str:
            return f"{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        def steps() -> int:
            path = run / "metrics.jsonl"
            return len(lines(path)) if path.exists() else 0

        def worlds() -> list[int]:
            path = run / "events.jsonl"
            events = lines(path) if path.exists() else []
            return [one["processes"] for one in events if one["event"] == "run_started"]

        nodes.start(0)
        nodes.start(1)
        wait_for(lambda: steps() > 5, 90, told)
        nodes.kill(0)  # where rank 0 was, who drew the run and had its folder
        wait_for(lambda: len(worlds()) == 2 and steps() > 8, 60, told)
        nodes.start(0)
        wait_for(lambda: len(worlds()) == 3, 60, told)
        assert [agent.wait(90) for agent in nodes.agents.values()] == [0, 0], told()
    assert worlds() == [2, 1, 2]
    alone = [sys.executable, "-m", "shoal", "train", *WORDS, "launch.processes=1", "run.name=alone"]
    subprocess.run(alone, check=True, timeout=300, cwd=tmp_path)
    here, there = (
        lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("job-job", "alone")
    )
    assert [row["step"] for row in here] == [row["step"] for row in there] == list(range(1, 61))
    assert [row["loss"] for row in here] == pytest.approx([row["loss"] for row in there], rel=1e-9)
