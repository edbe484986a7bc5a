"""Faults of users' own loops end the run in one line, or are told; right loops get no line."""

from __future__ import annotations

import pytest

from loop_faults import ROWS, SILENT, TABLE

CASES = [
    pytest.param(name, layout, marks=[pytest.mark.proof("faults")] if later else [])
    for name, layout, later in ROWS
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_named_or_right(worlds, name: str, layout: str) -> None:
    ranks = 1 if layout == "single" else 2
    answers = worlds(ranks).call("loop_faults:attempt", name=name, layout=layout)
    expected = TABLE[name].expected
    if expected == SILENT:
        assert [(a["error"], a["lines"]) for a in answers] == [("", [])] * ranks
        assert all(a["value"] <= 1e-6 for a in answers), answers
        return
    assert any(expected in line for line in [answers[0]["error"], *answers[0]["lines"]]), answers
    assert len({bool(a["error"]) for a in answers}) == 1, "all ranks or none"
    assert "\n" not in answers[0]["error"]
    assert "try: " in answers[0]["error"] or any("try: " in one for one in answers[0]["lines"])
