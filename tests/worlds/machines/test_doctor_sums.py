"""`shoal doctor` names the rank that gets a known sum wrong, in each collective and dtype."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_the_rank_with_a_wrong_sum_is_named(worlds, kind: str, dtype: str) -> None:
    answers = worlds(4).call("doctor_case:wrong_sum", rank=2, kind=kind, dtype=dtype)
    assert all(answer == answers[0] for answer in answers)
    ok, line = answers[0]
    assert not ok
    assert line.startswith(f"WRONG sums: rank 2: {kind} of {dtype} gave ")
    assert "(wrong on ranks 2 of 4)" in line


def test_a_sound_world_has_right_sums_and_six_pairs(worlds) -> None:
    answers = worlds(4).call("doctor_case:links")
    assert all(answer == answers[0] for answer in answers)
    assert [(name, ok) for name, ok, _ in answers[0]][:1] == [("sums", True)]
    assert {name for name, _, _ in answers[0]} == {"sums", "links"}
