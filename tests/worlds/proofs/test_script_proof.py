"""`shoal prove -- train.py`: right scripts are equal, known mistakes are named by tensor and step."""

from __future__ import annotations

from typing import Any

import pytest

from user_scripts import REFUSED, RIGHT, WRONG

IN_TEST = {("gan", "ddp"), ("loader", "pp"), ("saves_between", "fsdp")}
"""Right scripts of `make test`; the others are for `make proof`."""
WRONG_IN_TEST = {
    "a5_own_clipping",
    "a6_rate_of_the_second_group",
    "a7_data_replaced",
    "a8_temperature",
}


def marks(is_short: bool) -> Any:
    return [] if is_short else pytest.mark.proof("scripts")


def test_there_are_30_right_scripts() -> None:
    assert len(RIGHT) >= 30


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=marks((name, layout) in IN_TEST), id=f"{name}-{layout}")
        for name, (_, layouts) in RIGHT.items()
        for layout in layouts
    ],
)
def test_a_right_script_is_equal(worlds, name: str, layout: str) -> None:
    lifted = name == "float32_inside"  # the command does so by itself
    answers = worlds(2).call("script_case:attempt_right", name=name, layout=layout, lifted=lifted)
    assert answers[0]["verdict"] == "equal", answers[0]["text"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name in WRONG_IN_TEST), id=name) for name in WRONG]
)
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
