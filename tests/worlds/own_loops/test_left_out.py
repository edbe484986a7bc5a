"""On several ranks a step is over the samples that could be read, and all ranks know of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

POSITIONS = [2, 3, 13]
"""Rank 1's first micro-batch as a whole, and half of one of rank 0's in the second step."""


def close(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-12)
    for name, wanted in plain["weights"].items():
        got = torch.tensor(found["weights"][name], dtype=torch.float64)
        want = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "fsdp"])
def test_the_step_is_over_what_was_read(worlds, layout: str) -> None:
    (plain,) = worlds(1).call("left_out_case:plain", positions=POSITIONS)
    found = worlds(2).call("left_out_case:trained", layout=layout, positions=POSITIONS)
    for one in found:
        assert one["error"] == ""
        assert one["lost"] == [2, 3, 3], "both know of what one lost"
        close(one, plain)
    both = found[0]["own"] + found[1]["own"]
    assert len(both) == len(set(both)) == 22 - len(POSITIONS)


def test_past_the_cap_all_stop_with_one_line(worlds) -> None:
    found = worlds(2).call("left_out_case:trained", layout="ddp", positions=POSITIONS, unreadable=2)
    assert found[0]["error"] == found[1]["error"]
    assert found[0]["error"].startswith("ClusterError: dataset: sample ")
    assert "3 samples of this run could not be read, unreadable = 2" in found[0]["error"]
    assert found[0]["lost"] == [2], "the step that was one too many is told, and no more"


def test_ranks_that_read_the_same_leave_nothing_out(worlds) -> None:
    """Else each would leave out what itself could not read."""
    found = worlds(2).call("left_out_case:trained", layout={"tp": 2}, positions=[9])
    for one in found:
        assert one["error"].startswith("ClusterError: data.source: sample ")
        assert "part-" in one["error"]
        assert one["lost"] == [0]
