"""`shoal prove -- train.py`: right scripts are equal, known mistakes are named by tensor and step.

All of them: `make proof PART=scripts` (tests/proof/script_proofs.py).
"""

from __future__ import annotations

import pytest

from user_scripts import REFUSED, RIGHT, WRONG

IN_TEST = {("gan", "ddp"), ("loader", "pp"), ("saves_between", "fsdp")}
"""Right scripts of `make test`."""
WRONG_IN_TEST = {
    "a5_own_clipping",
    "a6_rate_of_the_second_group",
    "a7_state_kept_fsdp",
    "a8_temperature",
}


def test_there_are_30_right_scripts() -> None:
    assert len(RIGHT) >= 30


@pytest.mark.parametrize(("name", "layout"), sorted(IN_TEST))
def test_a_right_script_is_equal(worlds, name: str, layout: str) -> None:
    answers = worlds(2).call("script_case:attempt_right", name=name, layout=layout)
    assert answers[0]["verdict"] == "equal", answers[0]["text"]


@pytest.mark.parametrize("name", sorted(WRONG_IN_TEST))
def test_a_mistake_is_named(worlds, name: str) -> None:
    mistake = WRONG[name]
    (answer, *_) = worlds(mistake.ranks).call("script_case:attempt_wrong", name=name)
    assert answer["verdict"] == "different", answer["text"]
    assert answer["step"] == mistake.step, answer["text"]
    for part in mistake.finds:
        assert part in answer["text"]


@pytest.mark.parametrize("name", [name for name, (*_, reason) in REFUSED.items() if reason])
def test_a_script_that_cannot_be_proven_has_its_reason(worlds, name: str) -> None:
    text, layout, reason = REFUSED[name]
    (answer, *_) = worlds(2).call("script_case:attempt", text=text, layout=layout)
    assert answer["verdict"] == "not proven", answer["text"]
    assert reason in answer["reason"]
