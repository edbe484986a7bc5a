"""`torchrun --nnodes=1:2` on nodes without a common disk: who is left has all, who comes gets it.

A node is a network namespace, and the run folder a mount of its own there (elastic.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_run import lines
from elastic import Nodes, rounds, wait_for
from forks import Forks
from netns import Forbidden, skip
from shoal.checkpoint.format.listing import list_checkpoints, verify
from shoal.view.diagnose import diagnose
from test_elastic import LOOP, SLOWLY, WORDS, taken, unbroken

WHAT = "nodes that share no disk NOT TESTED"


def has(disk: Path, step: int) -> bool:
    """Whether a checkpoint of a step, or a later one, lies in a run folder."""
    return any(found.step >= step for found in list_checkpoints(disk / "checkpoints"))


def whole(disk: Path) -> dict[str, bytes]:
    """The newest checkpoint's files; it verifies."""
    newest = list_checkpoints(disk / "checkpoints")[0].path
    assert verify(newest) == []
    return {path.name: path.read_bytes() for path in newest.iterdir()}


def told(disk: Path, word: str) -> list[str]:
    """The lines for the user in an events.jsonl that have a word."""
    notices = [one["text"] for one in lines(disk / "events.jsonl") if one["event"] == "notice"]
    return [text for text in notices if word in text]


def test_who_is_left_goes_on_and_who_comes_back_gets_what_it_lacks(
    tmp_path: Path, programs: Forks
) -> None:
    """A node is a folder in which its rank starts; the run's is named from there."""
    logs, nodes = tmp_path / "logs", [tmp_path / f"node{number}" for number in (0, 1)]
    for folder in (logs, *nodes, tmp_path / "alone"):
        folder.mkdir()
    here, there = (node / "run" for node in nodes)

    def words(steps: int) -> list[str]:
        return [LOOP, str(steps), "0", str(logs), "run"]

    def together(steps: int) -> None:
        done = programs.world(2, *words(steps), nodes=nodes)
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]

    together(8)
    assert whole(here) == whole(there)
    lists = [json.loads((disk / "ranks.json").read_text())["ranks"] for disk in (here, there)]
    assert lists[0] == lists[1], "each disk has the whole list"
    assert [one["rank"] for one in lists[0]] == [0, 1]
    assert len(told(here, "lies on 2 disks")) == len(told(there, "lies on 2 disks")) == 1
    left = programs.run(*words(16), cwd=nodes[1])
    assert left.returncode == 0, left.stderr
    with (here / "metrics.jsonl").open("a") as file:  # of a step that was taken again
        file.write('{"step":9,"loss":7}\n')
    sampled = "".join(f'{{"step":{n},"layers":{{}}}}\n' for n in (1, 12, 18))
    (there / "experts.jsonl").write_text(sampled)  # of a model that has some
    together(24)
    assert [[row["step"] for row in lines(disk / "experts.jsonl")] for disk in (here, there)] == [
        [1, 12], [1, 12]
    ], "up to the step of the checkpoint"  # fmt: skip
    assert programs.run(*words(24), cwd=tmp_path / "alone").returncode == 0
    expected = [row["loss"] for row in lines(tmp_path / "alone" / "run" / "metrics.jsonl")]
    for disk in (here, there):
        rows = lines(disk / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 25))
        assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-12)
        assert [one.kind for one in diagnose(disk) if not one.advice] == []
    assert whole(here) == whole(there)
    (line,) = told(here, "came from rank 1")
    assert "checkpoint of step 16" in line
    assert "so did 8 rows of metrics.jsonl" in line
    assert not told(there, "came from rank")


def test_rank_0_of_shoal_train_is_brought_what_the_others_have(
    tmp_path: Path, programs: Forks
) -> None:
    """It settles the run, and its disk may be the one that is empty."""
    nodes = [tmp_path / f"node{number}" for number in (0, 1)]
    here, there = (node / "runs" / "job-job" for node in nodes)
    for node in nodes:
        node.mkdir()

    def together(steps: int, attempt: int) -> None:
        job = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        words = ["-m", "shoal", "train", *WORDS, f"train.steps={steps}"]
        done = programs.world(2, *words, nodes=nodes, environ=job)
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]

    together(8, 0)
    assert whole(here) == whole(there)
    assert (here / "run.toml").read_text() == (there / "run.toml").read_text()
    shutil.rmtree(here)
    together(12, 1)
    assert whole(here) == whole(there)
    for disk in (here, there):
        assert [row["step"] for row in lines(disk / "metrics.jsonl")] == list(range(1, 13))
        assert [one.kind for one in diagnose(disk) if not one.advice] == []
        assert (disk / "logs" / "job").read_text() == "job"
    started = [one for one in lines(here / "events.jsonl") if one["event"] == "run_started"]
    assert [one["resumed"] for one in started] == [True]


@pytest.mark.proof
def test_a_node_goes_on_from_its_own_disk_and_brings_the_other_up_to_it(tmp_path: Path) -> None:
    steps, logs = 64, tmp_path / "logs"
    logs.mkdir()
    run = tmp_path / "run"
    try:
        nodes = Nodes(tmp_path, [LOOP, str(steps), "0.3", str(logs), str(run)], own=run)
    except Forbidden as why:
        skip(WHAT, str(why))
    here, there = nodes.disk(0), nodes.disk(1)
    with nodes:

        def said() -> str:
            return f"{rounds(logs)}\n{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        nodes.start(0)
        nodes.start(1)
        wait_for(lambda: has(here, 4) and has(there, 4), 90, said)
        nodes.kill(0)  # what rank 0 had written is on its own disk alone
        wait_for(lambda: has(there, list_checkpoints(here / "checkpoints")[0].step + 4), 60, said)
        stale = list_checkpoints(here / "checkpoints")[0].step
        nodes.start(0)
        wait_for(
            lambda: sum(one["size"] == 2 and bool(one["steps"]) for one in rounds(logs)) == 4,
            *(60, said),
        )
        (logs / "fast").touch()
        assert [agent.wait(90) for agent in nodes.agents.values()] == [0, 0], said()
    assert not list(run.iterdir()), "the nodes' mounts were not their own"
    found = rounds(logs)
    assert [one["size"] for one in found] == [2, 2, 1, 2, 2]
    starts = [one["start"] for one in found]
    assert 0 == starts[0] < starts[2] < starts[3] == starts[4], "from its own disk, then the newest"
    assert starts[3] > stale
    taken_here, alone = taken(found), unbroken(tmp_path, steps)
    assert sorted(taken_here) == sorted(alone) == list(range(1, steps + 1))
    for step, (loss, seen) in alone.items():
        assert taken_here[step] == (pytest.approx(loss, rel=1e-12), seen), step
    epoch = sorted(n for step in range(1, 9) for n in taken_here[step][1])
    assert epoch == list(range(64)), "every sample once"
    assert whole(here) == whole(there)
    losses = [
        [(row["step"], row["loss"]) for row in lines(disk / "metrics.jsonl")]
        for disk in (here, there)
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, steps + 1))
    assert len(told(here, "lies on 2 disks")) == len(told(there, "lies on 2 disks")) == 2
    (line,) = told(here, f"checkpoint of step {starts[3]} came from rank")
    assert "rows of metrics.jsonl" in line
    assert not told(there, "came from rank")
    assert [one.kind for disk in (here, there) for one in diagnose(disk) if not one.advice] == []


@pytest.mark.proof
def test_shoal_train_goes_on_where_the_newest_run_lies(tmp_path: Path) -> None:
    """Rank 0's node comes back with an empty disk, and nobody names the folder."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    runs = tmp_path / "runs"
    command = ["-m", "shoal", "train", *WORDS, "train.on=['slowly:Slowly']"]
    try:
        nodes = Nodes(tmp_path, command, own=runs)
    except Forbidden as why:
        skip(WHAT, str(why))
    here, there = (nodes.disk(node) / "job-job" for node in (0, 1))
    with nodes:

        def said() -> str:
            return f"{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        nodes.start(0)
        nodes.start(1)
        wait_for(lambda: has(here, 4) and has(there, 4), 90, said)
        nodes.kill(0)
        shutil.rmtree(here)
        wait_for(lambda: has(there, 12), 90, said)
        nodes.start(0)
        wait_for(lambda: has(here, 16), 90, said)
        assert [agent.wait(90) for agent in nodes.agents.values()] == [0, 0], said()
    assert whole(here) == whole(there)
    alone = [sys.executable, "-m", "shoal", "train", *WORDS, "launch.processes=1", "run.name=alone"]
    subprocess.run(alone, check=True, timeout=300, cwd=tmp_path)
    expected = [row["loss"] for row in lines(runs / "alone" / "metrics.jsonl")]
    for disk in (here, there):
        rows = lines(disk / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 61))
        assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-9)
        assert [one.kind for one in diagnose(disk) if not one.advice] == []
        assert {"run.toml", "plan.json"} < {path.name for path in disk.iterdir()}
    sizes = [
        [one["processes"] for one in lines(disk / "events.jsonl") if one["event"] == "run_started"]
        for disk in (here, there)
    ]
    assert sizes == [[2], [2, 1, 2]]
