"""A stranger in a rank's place: the start fails and says so, and no sum is ever his."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stranger
from netns import FORBIDDEN, skip

RIGHT = "sum [2.0, 2.0, 2.0]"


def tried(programs: Any, how: str) -> list[Any]:
    """What both ranks said when the stranger was in, after tries in which he came too late."""
    stranger.needed("a stranger in a connection of gloo's")
    done = programs.run("worlds/hijack_case.py", how, timeout=300)
    if done.returncode == FORBIDDEN:
        skip("a stranger in a connection of gloo's", done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    *late, last = json.loads(done.stdout)
    assert all(one["said"] == RIGHT for answers in late for one in answers), late
    assert not any("sum" in one["said"] for one in last), "he was never in"
    return last


def test_who_takes_a_ranks_connection_is_noticed_at_the_start(programs) -> None:
    first, second = tried(programs, "proof")
    for answer in (first, second):
        assert "does not prove to be it" in answer["said"]
        assert answer["after_s"] < 10
    assert second["said"].startswith(
        "ClusterError: rank 1: who is connected in the place of rank 0"
    )


@pytest.mark.proof  # what the first one guards against
def test_without_the_proof_nobody_says_that_he_is_in(programs) -> None:
    """The control: the ranks wait for each other in a collective."""
    for answer in tried(programs, "no-proof"):
        assert "prove" not in answer["said"]
