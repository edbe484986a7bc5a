"""Ranks that run different blocks under fsdp, or step by other settings, end in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUIET = "nothing was raised"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
LATER = pytest.mark.proof("faults")


def named(answers: list[dict[str, Any]], *parts: str) -> None:
    for answer in answers:
        for part in parts:
            assert part in answer["error"], answers
        assert answer["error"].startswith("ConfigError: ")
        assert "\n" not in answer["error"]
        assert "; try: " in answer["error"]


def test_different_blocks_outside_of_the_models_pass(worlds) -> None:
    """Heads that the loss calls: nobody can join them, since no pass of the model is open."""
    answers = worlds(2).call(
        "unlike_ranks_case:blocks", layout="fsdp", kind="heads in the loss", way="evaluation"
    )
    what = "heads.a (forward pass) on rank 0, heads.b (forward pass) on rank 1"
    named(answers, f"run.evaluate: ranks run different blocks: {what}", 'try: layout="zero2"')
    assert [a["losses"] for a in answers] == [[], []]


@pytest.mark.parametrize(
    ("kind", "way", "more"),
    [
        ("heads", "batches", {}),
        ("experts", "evaluation", {}),
        pytest.param("layer drop", "own passes", {}, marks=LATER),
        pytest.param("order", "batches", {}, marks=LATER),
        pytest.param("layer drop", "batches", {"recompute": "full"}, marks=LATER),
    ],
)
def test_blocks_that_some_ranks_skip_are_joined(worlds, kind: str, way: str, more: Any) -> None:
    """They gathered each other's weights; ddp gathers none."""
    world, losses = worlds(2), {}
    for layout in ("ddp", "fsdp"):
        answers = world.call("unlike_ranks_case:blocks", layout=layout, kind=kind, way=way, **more)
        assert [(a["error"], a["lines"]) for a in answers] == [(QUIET, [])] * 2
        losses[layout] = answers[0]["losses"]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-12)


@pytest.mark.parametrize("kind", ["heads", "layer drop", "order"])
@pytest.mark.parametrize("layout", ["ddp", pytest.param("zero2", marks=LATER)])
def test_what_is_right_without_gathers_stays_silent(worlds, kind: str, layout: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:blocks", layout=layout, kind=kind)
    assert [(a["error"], a["lines"]) for a in answers] == [(QUIET, [])] * 2


@pytest.mark.parametrize("more", [{}, pytest.param({"recompute": "full"}, marks=LATER)])
def test_blocks_that_all_ranks_run_or_leave_out_stay_silent(worlds, more: Any) -> None:
    world = worlds(2)
    losses = {}
    for layout in ("ddp", "fsdp"):
        answers = world.call(
            "unlike_ranks_case:blocks", layout=layout, kind="layer drop", tasks="one", **more
        )
        assert [(a["error"], a["lines"]) for a in answers] == [(QUIET, [])] * 2
        losses[layout] = answers[0]["losses"]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-12)


def test_a_rank_without_samples_stays_silent(worlds) -> None:
    answers = worlds(2).call("unlike_ranks_case:no_samples", layout="fsdp")
    assert answers == [{"steps": 4, "lines": []}] * 2


def test_replicas_that_sum_gradients_of_different_blocks(worlds) -> None:
    """Each replica gathers its own, rightly; what they sum does not belong together."""
    answers = worlds(4).call(
        "unlike_ranks_case:blocks", layout=HSDP, kind="reentrant", tasks="halves"
    )
    what = "trunk.2 (gradients) on rank 0, trunk.1 (gradients) on rank 2"
    named(answers, f"step 1: ranks run different blocks: {what}")


def test_replicas_whose_different_blocks_have_no_gradients_stay_silent(worlds) -> None:
    world = worlds(4)
    losses = {}
    for layout in ("ddp", HSDP):
        answers = world.call(
            "unlike_ranks_case:blocks", layout=layout, kind="groups", tasks="halves"
        )
        assert [a["error"] for a in answers] == [QUIET] * 4
        losses[str(layout)] = answers[0]["losses"]
    assert losses[str(HSDP)] == pytest.approx(losses["ddp"], rel=1e-12)


FOUND = {
    "lr of group 1": "optimizer: the learning rate of group 1 is 0.02 on rank 0, 0.5 on rank 1",
    "lr of group 0": "optimizer: the learning rate is 0.01 on rank 0, 0.5 on rank 1",
    "weight_decay": "optimizer: weight_decay of group 1 is 0.01 on rank 0, 0.3 on rank 1",
    "betas": "optimizer: betas of group 0 is (0.9, 0.999) on rank 0, (0.8, 0.99) on rank 1",
    "eps": "optimizer: eps of group 1 is 1e-08 on rank 0, 0.001 on rank 1",
    "amsgrad": "optimizer: amsgrad of group 1 is False on rank 0, True on rank 1",
    "a new key": "optimizer: lr_scale of group 1 is not there on rank 0, 0.3 on rank 1",
    "tensor": "optimizer: the learning rate is 0.01 on rank 0, 0.5 on rank 1",
}
SHORT = {("lr of group 1", "ddp"), ("weight_decay", "fsdp"), ("betas", "zero1"),
         ("lr of group 1", "tp"), ("tensor", "ddp")}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        pytest.param(change, layout, marks=[] if (change, layout) in SHORT else LATER)
        for change in FOUND
        for layout in ("ddp", "zero1", "zero2", "fsdp", "tp", "pp")
    ],
)
def test_settings_of_one_rank_alone(worlds, change: str, layout: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:settings", layout=layout, change=change)
    named(answers, FOUND[change])
    assert [a["steps"] for a in answers] == [2, 2], "before the update"


@pytest.mark.parametrize("layout", ["ddp", pytest.param("tp", marks=LATER)])
def test_settings_that_change_between_the_halves_of_a_step(worlds, layout: str) -> None:
    """The all-reduce of that step is over: the next one names them, and no worn-out memory."""
    answers = worlds(2).call(
        "unlike_ranks_case:settings", layout=layout, change="weight_decay", when="between"
    )
    named(answers, FOUND["weight_decay"])


@pytest.mark.parametrize("layout", ["zero1", pytest.param("fsdp", marks=LATER)])
@pytest.mark.parametrize("change", ["lr of group 1", "tensor"])
def test_settings_that_all_ranks_change_stay_silent(worlds, layout: str, change: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:settings", layout=layout, change=change, who="all")
    assert [(a["error"], a["steps"]) for a in answers] == [(QUIET, 4)] * 2


ALONE = """
import sys
sys.path[:0] = [{folders}]
import torch, shoal
from torch import nn
from torch.utils.checkpoint import checkpoint
from unlike_ranks_case import Block, X, Y, squares

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(4))
        self.wide = nn.ModuleList([nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 6))])

    def forward(self, x, task):
        x = x.requires_grad_()
        for number, block in enumerate(self.trunk):
            if {skip}:
                break
            x = x + checkpoint(block, x, use_reentrant=True)
        return (checkpoint(self.wide[0], x, use_reentrant=True) if {wide} else x)[:, :3]

torch.manual_seed(0)
run = shoal.parallelize(Net().double(), lambda p: torch.optim.SGD(p, lr=0.1), squares, "fsdp",
                        precision="fp64", call="kwargs")
rank = run.world.rank
run.step(({{"x": X[:4], "task": torch.full((4,), rank)}}, Y[:4]))
"""


@LATER
@pytest.mark.parametrize(
    ("skip", "wide"),
    [("int(task[0]) and number == 2", "False"), ("False", "int(task[0]) == 0")],
    ids=["early exit waits", "unequal sizes abort"],
)
def test_a_loop_of_ones_own_is_named_from_outside(tmp_path: Path, skip: str, wide: str) -> None:
    """In step 1, after seconds: ranks wait for each other, or gloo ends the process."""
    here = Path(__file__).parents[1]
    folders = ", ".join(repr(str(one)) for one in (here, here.parent))
    (tmp_path / "loop.py").write_text(ALONE.format(folders=folders, skip=skip, wide=wide))
    words = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "loop.py"], cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=300,
        check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    (line,) = [one for one in output.splitlines() if "ranks run different blocks" in one]
    assert line.startswith("shoal: step 1: ranks run different blocks: "), line
    assert " on rank 0, " in line, line
    assert " on rank 1; " in line, line
    assert line.endswith('try: layout="zero2"'), line
