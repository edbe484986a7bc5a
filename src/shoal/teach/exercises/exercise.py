"""An exercise: a question with one number or word as its answer, and usual mistakes with reasons.

Answers are computed by the functions that the pages draw and calculate with, so that an exercise
and its page cannot disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.base.errors import PlanError

CLOSE = 0.01
"""Relative distance within which an answer counts: three digits are enough."""


@dataclass(frozen=True)
class Exercise:
    """One question.

    Attributes:
        name: page and number, as "why-1".
        question: with all figures that the answer needs.
        answer: a number in `unit`, or a word of `choices`.
        because: one sentence that derives the answer.
        hints: from a nudge to nearly everything.
        mistakes: wrong answers that people reach, each with what it leaves out.
    """

    name: str
    question: str
    answer: float | str
    because: str
    hints: tuple[str, ...]
    mistakes: tuple[tuple[float | str, str], ...]
    unit: str = ""
    choices: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Return the page that has this exercise."""
        return self.name.rpartition("-")[0]

    def answer_text(self) -> str:
        """Return the answer with its unit."""
        if isinstance(self.answer, str):
            return self.answer
        return f"{self.answer:.4g}{' ' if self.unit else ''}{self.unit}"


def check_answer(exercise: Exercise, text: str) -> str:
    """Return one line that confirms a right answer.

    Raises:
        PlanError: a wrong answer with its reason where it is a usual mistake, or no answer at all.

    >>> one = Exercise("a-1", "2 + 2?", 4.0, "Two pairs.", (), ((5.0, "one too many"),))
    >>> check_answer(one, "4.0")
    'a-1: 4 is right. Two pairs.'
    >>> check_answer(one, "5")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shoal.base.errors.PlanError: a-1: 5 is wrong: one too many; try: ...
    """
    if isinstance(exercise.answer, str):
        got: float | str = _read_word(exercise, text)
    else:
        got = _read_number(exercise, text)
    if _is_close(exercise.answer, got):
        return f"{exercise.name}: {exercise.answer_text()} is right. {exercise.because}"
    for value, reason in exercise.mistakes:
        if _is_close(value, got):
            raise PlanError(f"{exercise.name}: {text} is wrong: {reason}; {_hint_text(exercise)}")
    raise PlanError(f"{exercise.name}: {text} is wrong; {_hint_text(exercise)}")


def _hint_text(exercise: Exercise) -> str:
    return f"try: shoal simulate exercise {exercise.name} hint"


def _is_close(right: float | str, got: float | str) -> bool:
    if isinstance(right, str) or isinstance(got, str):
        return right == got
    return abs(got - right) <= CLOSE * abs(right) + 1e-9


def _read_word(exercise: Exercise, text: str) -> str:
    word = text.strip().lower()
    if word not in exercise.choices:
        raise PlanError(
            f"{exercise.name}: {text} is none of {', '.join(exercise.choices)}; "
            f"try: shoal simulate exercise {exercise.name} {exercise.choices[0]}"
        )
    return word


def _read_number(exercise: Exercise, text: str) -> float:
    """Return the number of an answer; its unit may be left out.

    Raises:
        PlanError: no number, or another unit.
    """
    found = re.fullmatch(r"([-−]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(\S*)", text.strip(), re.IGNORECASE)
    if found is None:
        raise PlanError(
            f"{exercise.name}: {text} is no number; try: shoal simulate exercise {exercise.name} 1"
        )
    unit = found[2].replace("×", "x")
    if unit and unit.lower() not in (exercise.unit.lower(), "x"):
        wanted = f"a number of {exercise.unit}" if exercise.unit else "a number without a unit"
        raise PlanError(
            f"{exercise.name}: {found[2]} is another unit, {wanted} is wanted; "
            f"try: shoal simulate exercise {exercise.name} {found[1]}"
        )
    return float(found[1].replace(",", "").replace("−", "-"))
