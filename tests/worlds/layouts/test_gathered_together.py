"""Many small blocks are one unit of fsdp: as few collectives, and the numbers of one process."""

from __future__ import annotations

import pytest

from proof_rows import rows

HABITS = ("in order", "skipped", "swapped", "twice")
POLICIES = ("none", "full")


@pytest.mark.parametrize(
    ("habit", "recompute"),
    rows((HABITS, POLICIES), kept=[("swapped", "none"), ("twice", "full")]),
)
def test_small_blocks_are_gathered_together(
    worlds, together_alone, habit: str, recompute: str
) -> None:
    alone = together_alone(habit)
    for told in worlds(2).call(
        "together_case:trained", layout="fsdp", habit=habit, recompute=recompute
    ):
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-12, abs=0)
        assert told["norms"] == pytest.approx(alone["norms"], rel=1e-11, abs=0)
        assert (told["gathers"], told["scatters"]) == (1, 1)


def test_blocks_that_the_user_names_stay_units(worlds) -> None:
    for told in worlds(2).call(
        "together_case:trained", layout="fsdp", habit="in order", blocks=("Block",)
    ):
        assert told["gathers"] > 40
        assert told["scatters"] == 41


@pytest.fixture
def together_alone(worlds):
    def alone(habit: str) -> dict:
        (told,) = worlds(1).call("together_case:trained", layout="single", habit=habit)
        return told

    return alone
