"""fsdp and hsdp whose ranks skip blocks equal one process, and order is kept."""

from __future__ import annotations

import pytest

import branch_case
from branch_case import WAYS, distance
from precision_case import alone


@pytest.mark.parametrize(
    ("kind", "way"), [("heads by task", "plain"), ("early exit", "written out")]
)
def test_ranks_that_skip_blocks_equal_one_process(worlds, kind: str, way: str) -> None:
    """Two of the rows of `tests/proof/branches.py`."""
    answers = worlds(2).call("branch_case:train", layout="fsdp", kind=kind, **WAYS[way])
    expected = branch_case.train(alone(), "single", kind, **WAYS[way])
    assert answers[0]["lines"] == expected["lines"]
    for answer in answers:
        assert answer["error"] == "nothing was raised"
        for key in ("losses", "norms"):
            assert answer[key] == pytest.approx(expected[key], rel=1e-12)
        for own, wanted in zip(answer["weights"], expected["weights"], strict=True):
            assert distance(own, wanted) < 1e-12
    assert any(answer["joined"] for answer in answers), "no rank skipped a block"


def test_a_block_that_goes_back_is_refused_before_its_gather(worlds) -> None:
    answers = worlds(2).call("branch_case:backwards", layout="fsdp")
    for answer in answers:
        assert answer["error"] == (
            "PlanError: layout = fsdp: trunk.0 runs after trunk.1, where no pass of the "
            "first step ran it, and ranks gather blocks in the order of that step; "
            'try: parallelize(sample=…) with a batch that runs both, or layout="zero2"'
        )
        assert answer["steps"] == 2


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.proof), True])
def test_models_that_skip_nothing_send_what_they_sent(worlds, reverse: bool) -> None:
    """In the order of registration from the first step on; in another one after it is learnt."""
    for counts in worlds(2).call("branch_case:collectives", layout="fsdp", reverse=reverse):
        own, wanted = counts["with visits"], counts["without"]
        assert len(own) == 4
        assert own[1:] == wanted[1:]
        assert (own[0] == wanted[0]) is not reverse
