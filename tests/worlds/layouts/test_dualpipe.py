"""Two copies of a model, fed from both ends, compute what one process computes.

Every rank holds two stages, every weight is on two ranks, and each copy sees half of a step's
micro-batches: gradients are summed over both, running statistics are one process's, a checkpoint
holds every weight once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from test_parts_resume import Legs, alone, assert_unbroken, run_legs

DUALPIPE = {"schedule": "dualpipe"}
PROVEN = [
    pytest.param("llama", {"pp": 2}, 25, marks=pytest.mark.proof),
    ("llama", {"pp": 4}, 25),
    pytest.param("llama", {"pp": 2}, 17, marks=pytest.mark.proof),
    pytest.param("llama", {"pp": 2, "dp_replicate": 2}, 25, marks=pytest.mark.proof),
    ("gpt", {"pp": 2, "dp_shard": 2, "zero": 1}, 25),
    pytest.param("gpt", {"tp": 2, "pp": 2}, 25, marks=pytest.mark.proof),
    ("resnet", {"pp": 2}, 25),
]
"""Model, degrees, samples: after a step of 16 comes one of 9, five micro-batches, or of one."""


@pytest.mark.parametrize(("model", "degrees", "samples"), PROVEN)
def test_two_copies_equal_one_process(
    worlds, model: str, degrees: dict[str, int], samples: int
) -> None:
    size = 2 if degrees == {"pp": 2} else 4
    layout = {**degrees, **DUALPIPE}
    told = worlds(size).call("dualpipe_case:prove", model=model, layout=layout, samples=samples)
    report = told[0]
    assert report["verdict"] == "equal", report["reason"] or report["cause"]
    assert report["trajectories"][0]["largest"]["gradient"] <= 1e-12


def test_buffers_of_both_copies_stay_equal(worlds) -> None:
    """Rank 0 and the last hold the same blocks and see other micro-batches."""
    told = worlds(4).call("dualpipe_case:loose")
    for rank in range(4):
        held = [place for place, values in enumerate(told[rank]) if values]
        assert held == [min(rank, 3 - rank), max(rank, 3 - rank)]
        assert told[rank] == told[3 - rank]
        assert all(any(told[rank][place]) for place in held)


LEGS: Legs = [
    (2, {"pp": 2, **DUALPIPE}, 1),
    (2, {"dp_shard": 2}, 1),
    (2, {"pp": 2, **DUALPIPE}, 1),
    (1, "single", 1),
]


@pytest.mark.proof
def test_every_layout_goes_on_from_two_copies(worlds, tmp_path: Path) -> None:
    """AdamW's moments and averaged weights included; each weight is in the checkpoint once."""
    told = run_legs(worlds, tmp_path / "legs", [("columns", "adamw")], LEGS)
    expected = alone(tmp_path / "one", "columns", "adamw", len(LEGS))
    assert_unbroken(told["columns adamw"], LEGS, expected)


def test_blocks_are_not_computed_twice_in_halves(worlds) -> None:
    for told in worlds(2).call("dualpipe_case:refused", recompute="full"):
        assert told.startswith("recompute = full: layout.schedule = dualpipe runs a backward")
        assert told.endswith('try: recompute="none", or layout={"schedule": "1f1b"}')
