"""`parallelize(…, prove="auto")`: the layout is proven at the first batch of a user's own loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EQUAL = "computes what one process computes"


@pytest.fixture
def attempt(worlds, tmp_path: Path):
    def run(loop: str, layout: str = "ddp", **more: Any) -> dict[str, Any]:
        folder = {"folder": str(tmp_path), **more}
        return worlds(2).call("loop_proof_case:attempt", loop=loop, layout=layout, **folder)[0]

    return run


def test_a_proven_run_has_the_bits_of_one_without_a_proof(attempt) -> None:
    """BatchNorm's buffers, dropout's draws and the generators among them."""
    first, second, without = (
        attempt("own_batches"),
        attempt("own_batches"),
        attempt("own_batches", prove="off"),
    )
    (line,) = first["lines"]
    assert EQUAL in line
    assert second["lines"] == [], "known by the cache"
    assert without["lines"] == []
    for key in ("error", "numbers", "drawn", "states"):
        assert first[key] == second[key] == without[key]


@pytest.mark.parametrize(
    ("loop", "layout"),
    [
        ("loss_of_the_model", "ddp"),
        ("written_out", "ddp"),
        ("experts", "zero2"),
        ("heads", "zero1"),
        ("batch_of_another_run", "ddp"),
        ("stacked_experts", "ep"),
        pytest.param("experts", "fsdp", marks=pytest.mark.proof("scripts")),
    ],
)
def test_a_right_loop_is_proven(attempt, loop: str, layout: str) -> None:
    answer = attempt(loop, layout)
    assert answer["error"] == ""
    assert answer["lines"]
    assert EQUAL in answer["lines"][0]


def test_a_difference_ends_the_run_before_its_first_step(attempt) -> None:
    answer = attempt("experts", bug="factor lost")
    assert answer["error"].startswith(
        "TrainingError: proof: ddp (dp_replicate = 2) on 2 processes does not compute what one"
    )
    assert answer["error"].endswith('shoal.parallelize(…, prove="off") trains all the same')
    assert answer["numbers"] == []


@pytest.mark.parametrize(
    "loop",
    [
        *(pytest.param(one, marks=pytest.mark.proof("scripts")) for one in ("heads", "layerdrop")),
        "sorted_heads",
    ],
)
def test_branches_are_proven_that_the_data_take(attempt, loop: str) -> None:
    """Ranks take other branches in the proof, too: they join the blocks of the others."""
    proven, unproven = attempt(loop, "fsdp"), attempt(loop, "fsdp", prove="off")
    assert EQUAL in proven["lines"][0]
    assert proven["joins"] > unproven["joins"]


def test_a_loss_keeps_nothing_of_the_proof(attempt) -> None:
    answer = attempt("counted_calls")
    assert EQUAL in answer["lines"][0]
    assert len(answer["numbers"]) == len(attempt("counted_calls", prove="off")["numbers"]) > 0


@pytest.mark.parametrize(
    ("loop", "layout"), [("compared_samples", "ddp"), ("split_written_out", "tp")]
)
def test_no_line_is_added_but_the_proofs_own(attempt, loop: str, layout: str) -> None:
    """The run tries its loss itself; the proof's own reads of weights are not the user's."""
    proven, unproven = attempt(loop, layout), attempt(loop, layout, prove="off")
    assert proven["error"] == ""
    assert EQUAL in proven["lines"][0]
    assert proven["others"] == unproven["others"]


def test_without_room_for_a_copy_it_says_so_and_trains(attempt) -> None:
    answer = attempt("large")
    (line,) = answer["lines"]
    assert "proof: not proven: memory: copies of the model for " in line
    assert line.endswith("training goes on")
    assert len(answer["numbers"]) > 3


def test_a_batch_that_one_rank_cannot_cut_is_named_on_all(worlds) -> None:
    first, second = worlds(2).call("loop_proof_case:odd_batch")
    assert first == second
    assert first.startswith("batch: ")


WITHOUT_PROOF = """
import sys
import torch
import shoal

net = torch.nn.Linear(4, 2)
loss = shoal.mean_of_samples(torch.nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
run = shoal.parallelize(net, optimizer, loss, "ddp", batch=4, prove="off")
run.step((torch.randn(2, 4), torch.tensor([0, 1])))
run.close()
run.print([name for name in sys.modules if name.startswith("shoal") and "proof" in name])
"""


def test_a_loop_without_a_proof_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_PROOF)
    environ = {k: v for k, v in os.environ.items() if k != "SHOAL_PROVE"} | {"OMP_NUM_THREADS": "1"}
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]
