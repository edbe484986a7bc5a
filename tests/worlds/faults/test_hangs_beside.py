"""A loop of the user's own under torchrun: who hangs is told from outside of the ranks.

What cannot come back by itself is ended, and torchrun starts the ranks again; what is busy in the
user's own code is told, and left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli_run import lines
from hanging import LOOP
from shoal.base.runlog.rank_records import read_rank_steps
from shoal.launch.processes import free_port
from test_hangs import WHY

HERE = Path(__file__).parents[1]


def start(folder: Path, asked: dict[str, Any]) -> subprocess.Popen[str]:
    shutil.copy(HERE / "hanging.py", folder)
    (folder / "hang.json").write_text(json.dumps(asked))
    (folder / "loop.py").write_text(LOOP)
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words, "--rdzv-endpoint", "localhost:0",
         "loop.py"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def left(folder: Path) -> list[int]:
    """Processes that still work there, once they had time to end."""
    until_s = time.monotonic() + 5
    while found := [one.pid for one in psutil.process_iter() if _in(one, folder)]:
        if time.monotonic() > until_s:
            return found
        time.sleep(0.1)
    return []


def _in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd().startswith(str(folder))
    except psutil.Error:
        return False


@pytest.mark.proof  # on two nodes: test_hangs_nodes.py
@pytest.mark.parametrize(("kind", "place"), [("stopped", "forward"), ("barrier", "forward")])
def test_what_cannot_come_back_is_ended_and_torchrun_goes_on(
    tmp_path: Path, kind: str, place: str
) -> None:
    asked = {"kind": kind, "place": place, "rank": 1, "after": 60}
    output, _ = (running := start(tmp_path, asked)).communicate(timeout=300)
    assert running.returncode == 0, output
    assert (tmp_path / "hung").exists(), output
    events = lines(tmp_path / "run" / "events.jsonl")
    (told,) = [event for event in events if event["event"] in ("hang", "collectives_differ")]
    assert told["rank"] == 1
    if kind == "barrier":
        assert "rank 1 called torch.distributed.barrier (hanging.py:" in told["text"]
        assert f"shoal: {told['text']}" in output, "a person sees it"
    else:
        assert told["why"].startswith(WHY[kind]), told
        assert told["deadline_s"] < 60, "learnt from the run"
        assert told["waited_s"] <= told["deadline_s"] + 2
        assert f"rank 1 on {told['host']}" in output, "a person sees it"
    steps = [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")]
    assert sorted(set(steps)) == list(range(1, 41))
    assert left(tmp_path) == []


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["lock", "loop"])
def test_what_is_busy_is_told_and_left_alone(tmp_path: Path, kind: str) -> None:
    asked = {"kind": kind, "place": "data", "rank": 0, "after": 100}
    running = start(tmp_path, asked)
    try:
        until_s, told = time.monotonic() + 100, []
        while not told and time.monotonic() < until_s and running.poll() is None:
            time.sleep(0.5)
            path = tmp_path / "run" / "events.jsonl"
            events = lines(path) if path.exists() else []
            told = [event for event in events if event["event"] == "hang"]
        assert [one["rank"] for one in told] == [0]
        assert told[0]["why"].startswith(WHY[kind]), told
        assert told[0]["waited_s"] <= told[0]["deadline_s"] + 2
        assert running.poll() is None
    finally:
        running.terminate()
        running.communicate(timeout=300)
    assert left(tmp_path) == []


BY_HAND = """
import os, time, torch, torch.distributed as dist, shoal

rank, trouble = int(os.environ.get("RANK") or 0), os.environ["TROUBLE"]

def summed(value):
    if dist.is_initialized():
        dist.all_reduce(value)

def least(value):
    if dist.is_initialized():
        dist.all_reduce(value)

def loss(outputs, targets):
    first, second = (summed, least) if trouble != "swap" or rank == 0 else (least, summed)
    first(outputs.detach().sum(0)), second(outputs.detach().amin(0))
    if trouble == "leave" and rank == 0 and run.step_count == 3:
        os._exit(3)
    return (outputs - targets) ** 2

run = shoal.parallelize(
    torch.nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), loss, folder="run",
)
for _ in range(30):
    run.step((torch.full((4, 4), 1.0 + rank), torch.ones(4, 2)))
    time.sleep(0.03)
run.close()
"""


@pytest.mark.parametrize(
    ("trouble", "ranks", "event"), [("swap", 2, "collectives_differ"), ("leave", 1, "worker_died")]
)
def test_a_loop_is_watched_whoever_started_it(
    tmp_path: Path, programs: Any, trouble: str, ranks: int, event: str
) -> None:
    """Ranks that a person gave their places, and one process: who sums otherwise, who left quietly."""
    (tmp_path / "loop.py").write_text(BY_HAND)
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TROUBLE": trouble}
    places = [{"RANK": f"{k}", "LOCAL_RANK": f"{k}", "WORLD_SIZE": "2"} for k in range(ranks)]
    started = [
        programs.start(["loop.py"], meets | (place if ranks > 1 else {}), tmp_path)
        for place in places
    ]
    said = [one.communicate(100) for one in started]
    assert all(one.returncode for one in started), said
    until_s, log = time.monotonic() + 10, tmp_path / "run" / "events.jsonl"
    while not (log.exists() and event in log.read_text()) and time.monotonic() < until_s:
        time.sleep(0.05)  # what tells of it outlives the ranks for a moment
    found = [one for one in lines(log) if one["event"] == event]
    assert [one["rank"] for one in found] == [ranks - 1], said
    assert left(tmp_path) == []
    kept = read_rank_steps(tmp_path / "run") or []
    assert {one.rank for one in kept} == set(range(ranks)), "and what each did in each step"
    assert [one.step for one in kept if not one.rank][:2] == [1, 2]
    assert all(one.peak_memory_bytes > 1 << 20 for one in kept)


@pytest.mark.proof
def test_a_clean_run_is_not_told_of(tmp_path: Path) -> None:
    output, _ = (running := start(tmp_path, {"place": "", "kind": "none"})).communicate(timeout=300)
    assert running.returncode == 0, output
    events = lines(tmp_path / "run" / "events.jsonl")
    assert not [one for one in events if one["event"] in ("hang", "slow_rank", "notice")]
    assert left(tmp_path) == []
