"""Hangs of the real command: the right rank, in time, with stacks, and the run goes on by itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_run import CommandLine

HERE = Path(__file__).parents[1]
ARGUMENTS = [
    "model.build=hanging:build", "data.source=hanging:data", "train.batch=8",
    "train.micro_batch=2", "train.steps=40", "checkpoint.every=8", "precision.compute=fp32",
    "train.prove=off", "launch.patience_s=0", "launch.processes=2",
]  # fmt: skip
WHY = {
    "stopped": "its process is stopped (SIGSTOP)",
    "lock": "Python does not answer: a call into C keeps its lock",
    "loop": "it is in no collective (hanging.py:",
    "barrier": "it is in torch.distributed.barrier (hanging.py:",
}


def hang(folder: Path, asked: dict[str, Any], *arguments: str) -> tuple[CommandLine, int, str]:
    """A run with a hang; (command, exit status, what it said)."""
    shutil.copy(HERE / "hanging.py", folder)
    (folder / "hang.json").write_text(json.dumps(asked))
    command = CommandLine(folder, *ARGUMENTS, *arguments)
    return command, *command.finish()


@pytest.mark.parametrize(
    ("kind", "place", "layout"),
    [
        pytest.param("stopped", "forward", "layout.strategy=ddp", marks=pytest.mark.proof),
        ("lock", "forward", "layout.strategy=ddp"),
        # Without training: tests/launch/test_watch.py, tests/cli/test_beside.py.
        pytest.param("loop", "data", "layout.pp=2", marks=pytest.mark.proof),
        pytest.param("barrier", "forward", "layout.strategy=ddp", marks=pytest.mark.proof),
    ],
)
def test_a_hang_is_told_in_time_with_its_rank_and_survived(
    tmp_path: Path, kind: str, place: str, layout: str
) -> None:
    after = 60 if place == "forward" else 150
    asked = {"kind": kind, "place": place, "rank": 1, "after": after}
    command, code, output = hang(tmp_path, asked, layout)
    assert (tmp_path / "hung").exists(), output
    assert code == 0, output
    (told,) = command.events("hang")
    assert told["rank"] == 1, told
    assert told["why"].startswith(WHY[kind]), told
    assert told["waited_s"] <= told["deadline_s"] + 2, told
    assert told["deadline_s"] < 30, "learnt"
    assert f"rank 1 on {told['host']}" in output
    accounts = (tmp_path / told["stacks"]).read_text()
    assert "rank 0 (pid" in accounts
    assert "trainer/step/optimizer_step.py" in accounts, "where the rank waits that is not at fault"
    (died,) = command.events("worker_died")
    assert (died["rank"], died["how"]) == (1, "ended by the watch")
    assert command.steps() == 40
    assert command.events("collectives_differ") == [], "its sums are in the same order everywhere"


@pytest.mark.parametrize(
    "kind",
    [
        *("swap", "apart"),
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("extra", "none")),
    ],
)
def test_sums_of_a_users_own_are_compared_over_ranks(tmp_path: Path, kind: str) -> None:
    """Two sums of equal shape in another order on rank 1: wrong numbers, and nothing fails."""
    asked = {"kind": kind, "place": "forward", "rank": 1}
    command, code, output = hang(tmp_path, asked, "layout.strategy=ddp", "train.steps=12")
    told = command.events("collectives_differ")
    if kind in ("swap", "extra"):
        assert code == 3, output
        (one,) = told
        assert one["rank"] == 1
        at = r"all_reduce of 4 float32 at hanging\.py:(\d+) from hanging\.py:(\d+)"
        found = re.search(rf"rank 0 calls .*? at (.*), rank 1 {at}", one["text"])
        assert found is not None, one
        if kind == "swap":
            assert re.search(rf"rank 0 calls {at}", one["text"])
            assert f"hanging.py:{found[3]}" not in found[1], "the lines that call the helper"
        assert one["text"] in output
        assert command.events("restarting") == [], "they would be summed wrongly again"
        return
    assert code == 0, output
    assert [one["step"] for one in told] == ([1] if kind == "apart" else [])
    assert ("do they belong together?" in output) == (kind == "apart")
