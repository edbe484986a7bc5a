"""What a rank other than rank 0 finds in the first steps has a line, with the rank."""

from __future__ import annotations

import pytest

COUPLED = "loss: what a sample adds depends on the others of its micro-batch"


@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_rank_0_prints_what_another_rank_found(worlds, layout: str) -> None:
    first, other = worlds(2).call("rank_findings_case:trained", layout=layout, masked=[1])
    assert len(first["lines"]) == 1
    assert first["lines"][0].startswith(f"shoal: rank 1: {COUPLED}")
    assert other["lines"] == []


def test_a_finding_of_all_ranks_has_one_line(worlds) -> None:
    """Their numbers differ, as the samples do."""
    first, other = worlds(2).call("rank_findings_case:trained", layout="ddp", masked=[0, 1])
    assert len(first["lines"]) == 1
    assert first["lines"][0].startswith(f"shoal: {COUPLED}")
    assert other["lines"] == []


def test_nothing_is_said_where_nothing_is_found(worlds) -> None:
    for one in worlds(2).call("rank_findings_case:trained", layout="ddp", masked=[]):
        assert one["lines"] == []


def test_a_buffer_that_each_rank_writes_for_itself_is_named_once(worlds) -> None:
    first, other = worlds(2).call("rank_findings_case:moved", layout="ddp", alike=False)
    assert len(first) == 1
    assert "buffer mean was written between steps, by other numbers on each rank" in first[0]
    assert other == []
    assert worlds(2).call("rank_findings_case:moved", layout="ddp", alike=True) == [[], []]


def test_a_tensor_of_the_loss_that_each_rank_writes_is_named_once(worlds) -> None:
    first, other = worlds(2).call("rank_findings_case:tuned", layout="ddp", alike=False)
    assert len(first) == 1
    assert "loss: factor [] that it uses was written between steps, by other numbers" in first[0]
    assert other == []
    assert worlds(2).call("rank_findings_case:tuned", layout="ddp", alike=True) == [[], []]
