"""What a round's events say of its merges, by numbers that a hand can check."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.base.layouts.island_options import METHODS, IslandsPolicy
from shoal.islands.admission import AdmissionVerdict
from shoal.islands.commit_vote import Ballot
from shoal.islands.merge_proposal import (
    MergeResult,
    collect_refusals,
    collect_round_fields,
    format_merge_lines,
)
from shoal.islands.methods import find_method
from shoal.islands.round_exchange import _select_products

BALLOT = Ballot(round=7, fragment=1, ok=True, digest="ab", tokens=40, steps_per_s=2.0, used=8)
VERDICT = AdmissionVerdict((0, 1), {}, (), {}, {}, {})
MERGE = MergeResult(7, 1, True, "", (0, 1), VERDICT, (BALLOT, BALLOT), 80.0, "ab", 0.5, 100)


def test_the_weights_of_a_pair_are_so_far_apart() -> None:
    """Messages −(3, 4) and −(3, 2): mean −(3, 3) of length √18, each at distance 1 from it."""
    gram = [[25.0, 17.0], [17.0, 13.0]]
    noloco = find_method(IslandsPolicy("noloco", count=4).resolved())
    assert noloco.weight_distance(gram) == pytest.approx(1 / math.sqrt(18), rel=1e-14)
    assert noloco.weight_distance([[25.0]]) is None, "an island alone"
    assert noloco.weight_distance([]) is None, "nobody's change counted"
    for name in METHODS:
        if name != "noloco":
            data = "own" if name == "scaffold" else "shared"
            method = find_method(IslandsPolicy(name, count=4, data=data).resolved())
            assert method.weight_distance(gram) is None, "they end up equal"


def test_who_was_refused_is_not_in_the_spread() -> None:
    nan = math.nan
    gram = [[25.0, nan, 17.0], [nan, nan, nan], [17.0, nan, 13.0]]
    assert _select_products(gram, (2, 5, 6), (2, 6)) == [[25.0, 17.0], [17.0, 13.0]]


def test_only_rounds_with_a_spread_say_one() -> None:
    assert "spread" not in collect_round_fields([MERGE])
    found = collect_round_fields([replace(MERGE, spread=0.25)])
    assert found["spread"] == 0.25
    assert (found["tokens_all"], found["divisor"], found["admitted"]) == (80, 80.0, [0, 1])


def test_a_refusal_in_any_fragment_is_told() -> None:
    """Of the first one where it was; and a fragment that was not merged, though the round was."""
    first = replace(VERDICT, refused={1: "island 1: its change is not finite"}, told=("odd",))
    later = replace(VERDICT, refused={1: "later", 0: "island 0: too large"})
    merges = [
        replace(MERGE, fragment=0, verdict=first),
        replace(MERGE, fragment=1, verdict=later, committed=False, why="no majority"),
        replace(MERGE, fragment=2),
    ]
    assert collect_refusals(merges) == {
        0: "island 0: too large",
        1: "island 1: its change is not finite",
    }
    assert list(collect_round_fields(merges)["refused"]) == ["0", "1"]
    assert format_merge_lines(merges) == ["odd", "fragment 1 was not merged: no majority"]
