"""Bytes of weights, gradients and optimizer state per element and rank: the table of the ZeRO paper.

Counted from live storages after a step's last backward pass, Adam, against arithmetic; and held
against all tensors that Python knows of and against the heap, so that nothing is left out.
"""

from __future__ import annotations

from typing import Any

import pytest

LAYOUTS = ("ddp", "zero1", "zero2", "fsdp")
BYTES_PER_ELEMENT = {
    "fp32": {
        "ddp": lambda n: (4, 4, 8),
        "zero1": lambda n: (4, 4, 8 / n),
        "zero2": lambda n: (4, 4 / n, 8 / n),
        "fsdp": lambda n: (4 / n, 4 / n, 8 / n),
    },
    "bf16": {
        "ddp": lambda n: (2, 4, 12),
        "zero1": lambda n: (2, 4, 12 / n),
        "zero2": lambda n: (2, 4 / n, 12 / n),
        "fsdp": lambda n: (4 / n, 4 / n, 8 / n),
    },
}
"""Precision → layout → (weights, gradients, optimizer's own) at n ranks; masters are the
optimizer's, except under fsdp, which gathers narrow copies of them and frees those."""

WANTED = [(precision, layout) for precision in BYTES_PER_ELEMENT for layout in LAYOUTS]
SHORT = {
    2: [("fp32", layout) for layout in ("zero1", "fsdp")],
    4: [("bf16", layout) for layout in ("ddp", "zero2", "fsdp")],
}
CASES = [
    pytest.param(*one, ranks, marks=[] if one in SHORT[ranks] else [pytest.mark.proof])
    for one in WANTED
    for ranks in SHORT
]
"""Theory is one formula in n: each format on one number of ranks, each layout in one format or two;
`make proof` has all."""
LITTLE_BYTES = 2**20  # activations of one sequence, Python's objects

Measured = dict[tuple[str, str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def measured(worlds, request: pytest.FixtureRequest) -> Measured:
    """(precision, layout, ranks) → what every rank counted; all where tests want them."""
    found: Measured = {}
    for ranks, short in SHORT.items():
        rows = short if request.config.option.markexpr == "not proof" else WANTED
        wanted = [[layout, precision] for precision, layout in rows]
        answers = worlds(ranks).call("states_case:measure_all", wanted=wanted)
        for place, one in enumerate(rows):
            found[(*one, ranks)] = [answer[place] for answer in answers]
    return found


@pytest.mark.parametrize(("precision", "layout", "ranks"), CASES)
def test_states_take_what_theory_says(
    measured: Measured, precision: str, layout: str, ranks: int
) -> None:
    theory = BYTES_PER_ELEMENT[precision][layout](ranks)
    for counted in measured[precision, layout, ranks]:
        elements = counted["elements"]
        assert elements >= 1_000_000
        assert counted["total"] / elements == pytest.approx(sum(theory), rel=0.05)
        for kind, expected in zip(("weights", "gradients", "optimizer"), theory, strict=True):
            assert counted[kind] / elements == pytest.approx(expected, rel=0.05), kind


@pytest.mark.parametrize(("precision", "layout", "ranks"), CASES)
def test_nothing_else_is_alive(measured: Measured, precision: str, layout: str, ranks: int) -> None:
    """A flat buffer that outlives its use would be no state, and memory all the same.

    The memory of transfers stays under zero1 and zero2, a few buckets; here they hold the model.
    """
    for counted in measured[precision, layout, ranks]:
        assert counted["transfers"] <= (4 + 1 / ranks) * 4 * counted["elements"]
        total = counted["total"] + counted["transfers"]
        assert counted["tensors"] == pytest.approx(total, rel=0.02)
        if counted["heap"] >= 0:
            assert counted["heap"] <= 1.05 * total + LITTLE_BYTES
        assert counted["left"] == 0, "something holds tensors of a run that is over"


def test_the_table_is_the_papers() -> None:
    """Sums of the three kinds, as everybody writes them."""
    for n in (2, 4):
        sums = {
            k: [sum(row[layout](n)) for layout in LAYOUTS] for k, row in BYTES_PER_ELEMENT.items()
        }
        assert sums["fp32"] == [16, 8 + 8 / n, 4 + 12 / n, 16 / n]
        assert sums["bf16"] == [18, 6 + 12 / n, 2 + 16 / n, 16 / n]
