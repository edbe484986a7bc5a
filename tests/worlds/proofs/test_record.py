"""Root forward passes before step 1 are counted in one place, and they are few (decision 18)."""

from __future__ import annotations

from typing import Any

import pytest

LOOK = {"look": 1}
PIPELINE = {"look": 1, "flow": 2}
"""In training and in evaluation mode, values are followed; then every stage is checked: on one rank
of a machine, which tells the others."""
FILLS, MODES = 2, 2

CASES: list[tuple[int, str, Any, dict[str, int]]] = [
    (2, "our gpt", "ddp", {}),
    (2, "our gpt", "zero2", {}),
    (2, "our gpt", "fsdp", LOOK),  # on the meta device
    (2, "our gpt", {"tp": 2}, LOOK),
    (2, "our gpt", {"cp": 2}, LOOK),
    (2, "our gpt", {"pp": 2}, {**PIPELINE, "check": 2 * FILLS * MODES}),
    (2, "our moe", {"dp_replicate": 2, "ep": 2}, LOOK),
    (4, "our gpt", {"tp": 2, "pp": 2}, {**PIPELINE, "check": 2 * FILLS * MODES}),
    (4, "our gpt", {"tp": 2, "dp_shard": 2}, LOOK),
]
GROUPS = {
    "2 gpt": CASES[:6],
    "2 moe": CASES[6:7],
    "4 tp pp": CASES[7:8],
    "4 tp fsdp": CASES[8:],
}
"""Layouts of one world and model; tp and fsdp have a row of their own in the first group."""


@pytest.mark.parametrize(
    "group", [*list(GROUPS)[:3], pytest.param("4 tp fsdp", marks=pytest.mark.proof)]
)
def test_every_pass_is_counted(worlds: Any, group: str) -> None:
    mine = GROUPS[group]
    ranks, model = mine[0][:2]
    layouts = [case[2] for case in mine]
    answers = worlds(ranks).call("record_case:passes", model=model, layouts=layouts)
    for rank, answer in enumerate(answers):
        for told, (_, _, layout, whole) in zip(answer, mine, strict=True):
            expected = whole
            if rank and "flow" in whole:
                expected = LOOK if "tp" in layout else {}
            assert told == {"ran": sum(expected.values()), "passes": expected}, layout
