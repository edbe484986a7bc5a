"""The catalogue's models compute on several processes what they compute on one."""

from __future__ import annotations

import pytest

import models_case
from shoal.view.proof_lines import proof_text

ROWS = [
    pytest.param(
        case,
        layout,
        # Where fsdp gathers a model block by block, ddp sums the same gradients.
        marks=[pytest.mark.proof] if layout == "ddp" or case in ("gpt", "moe", "foreign") else [],
    )
    for case in models_case.ARGUMENTS
    for layout in ("ddp", "fsdp")
]


@pytest.mark.parametrize(("case", "layout"), ROWS)
def test_a_layout_equals_one_process(worlds, layout: str, case: str) -> None:
    if case == "foreign":
        pytest.importorskip("transformers")
    reports = worlds(2).call("models_case:prove", case=case, layout=layout)
    assert all(r["verdict"] == "equal" for r in reports), proof_text(reports[0])
    for told in reports[0]["trajectories"]:
        assert told["largest"]["loss"] <= 1e-12
