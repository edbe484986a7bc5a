"""Saving beside training, with real processes: one verdict for all, no hang, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from saving_case import ROWS, WIDTH


def test_fifty_saves_back_to_back(worlds, tmp_path) -> None:
    answers = worlds(2).call(
        "saving_case:back_to_back", folder=str(tmp_path), saves=50, deadline_s=60
    )
    for rank, answer in enumerate(answers):
        assert answer["kept"] == [49, 48, 47]
        assert answer["right"] == [True] * 3
        assert answer["last"] == 49
        assert answer["sums"], "training's own all-reduces went wrong"
        assert answer["files"] == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
        assert answer["notices"] == []
        assert answer["events"] == ([] if rank else ["checkpoint_saved"] * 50)
        assert answer["steps"] == ([] if rank else list(range(50)))


@pytest.mark.parametrize("size", [2, 4])
def test_a_writer_that_fails_on_rank_1_is_known_to_all_at_one_step(worlds, tmp_path, size) -> None:
    answers = worlds(size).call("saving_case:failing_writer", folder=str(tmp_path), deadline_s=60)
    assert len({a["step"] for a in answers}) == 1, "ranks learnt it at different steps"
    assert answers[0]["step"] is not None
    assert any(a["heard"] for a in answers)
    assert len({a["text"] for a in answers}) == 1
    text = answers[0]["text"]
    assert text.startswith("checkpoints/step-2 was not saved: rank 1: checkpoints/step-2.tmp-")
    assert text.endswith("/rank-1.safetensors: File too large; older checkpoints are as they were")
    for rank, answer in enumerate(answers):
        assert answer["left"] == ["step-1"], "the failed save left something"
        assert answer["quiet"] == 0, "a failure that was told is told again"
        assert answer["right"] == [True, True]
        assert answer["notices"] == [text]
        told = [["checkpoint_saved", 1], ["checkpoint_failed", 2], ["checkpoint_saved", 3]]
        assert answer["events"] == ([] if rank else told)


@pytest.mark.parametrize("first", [True, False])
def test_a_bad_state_on_one_rank_is_known_to_all(worlds, tmp_path, first) -> None:
    answers = worlds(2).call(
        "saving_case:bad_state_on_one_rank", folder=str(tmp_path), first=first, deadline_s=60
    )
    for answer in answers:
        assert answer["text"] == (
            "checkpoints/step-2 was not saved: rank 1: model.c: the data has 3 elements of "
            "float32, its shard 32768 of float32; older checkpoints are as they were"
        )
        assert answer["step"] == answers[0]["step"]
        assert answer["kept"] == ([3] if first else [3, 1])


def test_a_record_that_rank_0_cannot_write(worlds, tmp_path) -> None:
    answers = worlds(2).call(
        "saving_case:record_that_is_no_json", folder=str(tmp_path), deadline_s=60
    )
    for answer in answers:
        assert "step-1 was not saved: rank 0: the run's record is not plain JSON" in answer["text"]
        assert answer["kept"] == [2]


def test_offers_that_change_on_one_rank_only(worlds, tmp_path) -> None:
    answers = worlds(2).call(
        "saving_case:offers_of_one_rank_change", folder=str(tmp_path), deadline_s=60
    )
    for answer in answers:
        assert answer["right"] == [True] * 3
        assert answer["late"] == [[2.0] * 5, [3.0] * 5]
        assert answer["stored"] == [False, True]


def test_the_training_thread_only_copies(worlds, tmp_path) -> None:
    answers = worlds(2).call(
        "saving_case:the_training_thread_only_copies", folder=str(tmp_path), deadline_s=60
    )
    for answer in answers:
        assert answer["opened"] == ["shoal-saves_0"]
        assert answer["talked"] == ["shoal-saves_0"]
        assert answer["right"]
        # One of the two replicas, and its half of the tensor that is cut: nothing twice.
        assert answer["held_bytes"] == 4 * ROWS * WIDTH * 3 // 2


def test_the_last_save_is_waited_for(worlds, tmp_path) -> None:
    answers = worlds(2).call(
        "saving_case:the_last_one_is_waited_for", folder=str(tmp_path), deadline_s=60
    )
    for rank, answer in enumerate(answers):
        assert answer["saved"] == "step-2"
        assert answer["failed"]
        assert answer["right"] == [True, True]
        told = [["checkpoint_saved", 1], ["checkpoint_saved", 2], ["checkpoint_failed", 3]]
        assert answer["events"] == ([] if rank else told)
        assert len(answer["notices"]) == 1


SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import torch
from shoal.base.errors import ClusterError
from shoal.base.runlog.events import EventLog
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.save import shard_writer
from shoal.checkpoint.save.write import Piece
from shoal.fabric import start_world
from shoal.trainer.run_folder.run_saves import RunSaver
world = start_world()
folder = Path(sys.argv[1])
log = EventLog(folder / "events.jsonl", world.rank)
saving = RunSaver(world, log.emit, print)
piece = Piece(Shard.whole("w", (4096,), "float32"), torch.ones(4096))
def gloo():
    return [n for n in (p.read_text() for p in Path("/proc/self/task").glob("*/comm")) if "gloo" in n]
"""

CLOSES = """
import shoal.trainer.parallelize  # all that a run imports: some of it might hold the group
for step in range(3):
    saving.start(folder / "checkpoints", step, [piece], {}, keep=1)
saving.close()
world.close()
sys.exit(7 if gloo() else 0)
"""

FORGETS = """
saving.start(folder / "checkpoints", 1, [piece], {}, keep=1)
assert gloo()
"""


def two_processes(script: str, folder: Path) -> tuple[list[int], list[str]]:
    """(exit codes, standard errors) of two ranks that run a script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SCRIPT + script, str(folder)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        words = [p.communicate(timeout=300)[1] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], words


@pytest.mark.proof  # beside two worlds of runs: test_exit.py
def test_close_ends_every_gloo_thread_of_the_twin(tmp_path) -> None:
    codes, words = two_processes(CLOSES, tmp_path)
    assert codes == [0, 0], f"7: a gloo thread outlived close; -6: the exit aborted; {words}"
    assert os.listdir(tmp_path / "checkpoints") == ["step-2"]


@pytest.mark.proof  # of a run, after two that were closed: test_exit.py
def test_a_script_that_forgets_close_still_saves_and_tells(tmp_path) -> None:
    codes, words = two_processes(FORGETS, tmp_path)
    assert codes == [0, 0], words
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]
    told = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().split()]
    assert told == ["checkpoint_saved"]


def test_a_rank_that_dies_in_a_save_ends_the_others_wait(worlds, tmp_path) -> None:
    world = worlds(2)
    world.ask("saving_case:a_rank_dies_in_a_save", folder=str(tmp_path))
    codes = [process.wait(60) for process in world.processes]
    assert codes == [1, -signal.SIGKILL], [path.read_text() for path in world.log_paths]
    assert (
        (tmp_path / "text")
        .read_text()
        .startswith(
            "rank 0: checkpoints/step-2 was not saved, and what the other ranks have is not known: "
        )
    )
    assert "step-1" in os.listdir(tmp_path / "checkpoints")
    assert "step-2" not in os.listdir(tmp_path / "checkpoints")
