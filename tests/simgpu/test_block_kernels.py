"""A block of ours launches no more than the same block by hand: kernels, casts and copies."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import world

from shoal.base.layouts.policies import POLICIES

HEAD = "loss of 32768 classes"
PAIRS = {"ours ddp": "DDP by hand"}
"""Each beside the program by hand with the same formats."""
if "residual" in POLICIES:
    PAIRS["ours fsdp, bf16 residual"] = "FSDP2 by hand"


@pytest.fixture(scope="module")
def rows(forks: Any) -> dict[str, Any]:
    names = [*PAIRS, *PAIRS.values(), HEAD]
    told = world("block_kernels.py", 2, ("rank", *names), {}, forks.start)
    assert told["device"] == "cuda:0"
    found: dict[str, Any] = told["rows"]
    return found


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("part", ["kernels", "casts", "copies", "collectives"])
def test_a_block_launches_no_more_than_by_hand(rows: dict[str, Any], name: str, part: str) -> None:
    ours, theirs = (rows[one] for one in (name, PAIRS[name]))
    assert ours["block"][part] <= theirs["block"][part], (ours["operators"], theirs["operators"])
    assert theirs["block"]["kernels"] > 20


def test_the_loss_launches_no_stripe_by_stripe(rows: dict[str, Any]) -> None:
    """A large vocabulary took a product and a sum for each 1,024 classes: 32 of both here."""
    assert rows[HEAD]["operators"]["mm"] == 3
    assert rows[HEAD]["outside"]["kernels"] <= 40
