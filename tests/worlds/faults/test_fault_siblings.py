"""Further examples of faults in users' own loops: each is named in a line, or right."""

from __future__ import annotations

import pytest

from fault_siblings import ROWS, SILENT, TABLE


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("name", "layout"), ROWS, ids=str)
def test_named_or_right(worlds, name: str, layout: str) -> None:
    ranks = 1 if layout == "single" else 2
    answers = worlds(ranks).call("fault_siblings:attempt", name=name, layout=layout)
    expected = TABLE[name].expected
    if expected == SILENT:
        assert [(a["error"], a["lines"]) for a in answers] == [("", [])] * ranks
        assert all(a["value"] <= 1e-6 for a in answers), answers
        return
    assert any(expected in line for line in [answers[0]["error"], *answers[0]["lines"]]), answers
    assert len({bool(a["error"]) for a in answers}) == 1, "all ranks or none"
    assert "try: " in answers[0]["error"] or any("try: " in one for one in answers[0]["lines"])
