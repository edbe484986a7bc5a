"""A run that changes its layout at every restart goes on as if it had never stopped.

Float64; the loss and gradient norm of every step within 1e-10 of an unbroken run of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import resume_case
from shoal.fabric import start_world

STEPS = 2  # per leg; an epoch has three, so legs begin at every place of it
SLICED_LEGS = [
    (4, "fsdp"),
    (2, "ddp"),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
    (3, "zero1"),
    (1, "single"),
]
WHOLE_LEGS = [(2, "zero2"), (3, "zero1"), (4, "ddp"), (1, "single")]
BOUND = 1e-10
SLICED = [(case, name) for case in ("llama", "mlp") for name in resume_case.SLICED]
WHOLE = [(case, name) for case in ("llama", "mlp") for name in resume_case.WHOLE]
SHORT = {("mlp", name) for name in ("sgd", "adamw", "adafactor", "muon")}
"""Rows that `make test` runs, of each kind of state one; `make proof` runs them all. Transformers go on in
test_parts_resume."""

Legs = list[dict[str, list[Any]]]


def run_legs(worlds, folder: Path, wanted: list[tuple[str, str]], legs: list[Any]) -> Legs:
    """Per leg, by "case optimizer": what every rank told."""
    told: Legs = []
    for size, layout in legs:
        arguments = {"folder": str(folder), "wanted": wanted, "layout": layout, "steps": STEPS}
        if size == 1:
            answers = [resume_case.leg(start_world({}), **arguments)]
        else:
            answers = worlds(size).call("resume_case:leg", **arguments)
        told.append({name: [answer[name] for answer in answers] for name in answers[0]})
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


def is_long(row: tuple[str, str]) -> bool:
    return row not in SHORT


def wanted(rows: list[tuple[str, str]], request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """The rows that are asked for."""
    short = request.config.option.markexpr == "not proof"
    return [row for row in rows if not (short and is_long(row))]


def marked(rows: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*r, marks=[pytest.mark.proof] if is_long(r) else []) for r in rows]


@pytest.fixture(scope="module")
def sliced(worlds, folder: Path, request: pytest.FixtureRequest) -> Legs:
    """fsdp 4 → ddp 2 → hsdp 2×2 → zero1 3 → single."""
    return run_legs(worlds, folder, wanted(SLICED, request), SLICED_LEGS)


@pytest.fixture(scope="module")
def whole(worlds, folder: Path, request: pytest.FixtureRequest) -> Legs:
    """zero2 2 → zero1 3 → ddp 4 → single."""
    return run_legs(worlds, folder, wanted(WHOLE, request), WHOLE_LEGS)


def assert_unbroken(legs: Legs, case: str, optimizer: str, folder: Path) -> None:
    told = [leg[f"{case} {optimizer}"] for leg in legs]
    for place, ranks in enumerate(told):
        began = place * STEPS if place else -1
        assert [rank["began"] for rank in ranks] == [began] * len(ranks), f"leg {place}"
        assert all(rank["saved"] for rank in ranks)
        assert all(rank["curve"] == ranks[0]["curve"] for rank in ranks), f"leg {place}"
    curve = [point for ranks in told for point in ranks[0]["curve"]]
    expected = resume_case.train(
        start_world({}), folder / "unbroken" / f"{case}-{optimizer}", case, optimizer, "single",
        len(curve),
    )  # fmt: skip
    for step, (ours, theirs) in enumerate(zip(curve, expected["curve"], strict=True), 1):
        assert ours == pytest.approx(theirs, rel=BOUND, abs=0), f"step {step}"
    assert told[-1][0]["weights"] == pytest.approx(expected["weights"], rel=BOUND)


@pytest.mark.parametrize(("case", "optimizer"), marked(SLICED))
def test_a_run_goes_on_over_all_layouts(
    sliced: Legs, folder: Path, case: str, optimizer: str
) -> None:
    assert_unbroken(sliced, case, optimizer, folder)


@pytest.mark.parametrize(("case", "optimizer"), marked(WHOLE))
def test_a_run_with_whole_owners_goes_on(
    whole: Legs, folder: Path, case: str, optimizer: str
) -> None:
    assert_unbroken(whole, case, optimizer, folder)


def test_the_legs_hold_the_traps(sliced: Legs, whole: Legs) -> None:
    """Some ranks step nothing of a parameter, and some own no member of a group."""
    fsdp = [set(rank["steps"]) for rank in sliced[0]["mlp sgd"]]
    assert "last.weight" in fsdp[0]  # it has one row
    assert all("last.weight" not in names for names in fsdp[1:])
    zero1 = [set(rank["steps"]) for rank in sliced[3]["mlp adamw"]]
    assert any(a != b for a in zero1 for b in zero1)
    owners = [set(rank["steps"]) for rank in whole[1]["mlp muon"]]
    assert not set.intersection(*owners)
