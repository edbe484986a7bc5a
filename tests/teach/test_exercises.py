"""Exercises: the reference answer is accepted, usual mistakes are rejected with their reason."""

from __future__ import annotations

import pytest

from shoal.base.errors import ConfigError, PlanError
from shoal.teach.exercises.answers import all_exercises, exercise_lines, exercise_record
from shoal.teach.exercises.exercise import Exercise, check_answer

EXERCISES = all_exercises()


def text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


@pytest.mark.parametrize("name", EXERCISES)
def test_an_answer_is_accepted_and_mistakes_are_rejected(name: str) -> None:
    one = EXERCISES[name]
    assert check_answer(one, text(one.answer)).startswith(f"{name}: ")
    assert check_answer(
        one, one.answer_text().replace(one.unit, "") if one.unit else text(one.answer)
    )
    assert len(one.mistakes) >= 2
    assert one.hints
    reasons = [reason for _, reason in one.mistakes]
    assert len(set(reasons)) == len(reasons)
    for value, reason in one.mistakes:
        with pytest.raises(PlanError) as failure:
            check_answer(one, text(value))
        assert f" is wrong: {reason}; try: shoal simulate exercise {name} hint" in str(
            failure.value
        )


def test_there_are_thirty() -> None:
    assert len(EXERCISES) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["why-3"], "there is no such exercise; try: shoal simulate exercise why-"),
        (["why-1", "much"], "much is no number"),
        (["why-1", "6.4", "ms"], "another unit, a number without a unit is wanted"),
        (["why-2", "181", "s"], "another unit, a number of ms is wanted"),
        (["proving-1", "maybe"], "none of rounding, bug, neither"),
        (["why-1", "7.7"], "7.7 is wrong; try: shoal simulate exercise why-1 hint"),
    ],
)
def test_what_is_no_answer_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as failure:
        exercise_lines(words)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_numbers_are_read_as_people_write_them() -> None:
    one = Exercise("a-1", "?", -1500.0, "So.", ("Hint.",), (), unit="MB")
    for typed in ("-1500", "−1,500", "-1.5e3", "-1500 MB", "-1500mb"):
        assert check_answer(one, typed)


def test_a_page_gets_what_it_needs() -> None:
    record = exercise_record(EXERCISES["why-1"])
    assert record["answer"] == pytest.approx(6.4)
    assert record["text"] == "6.4"
    assert exercise_lines(["why-1", "hint"])[0].startswith("1. ")
    assert len(exercise_lines([])) == len(EXERCISES)
