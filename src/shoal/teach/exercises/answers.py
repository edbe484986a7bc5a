"""List the exercises, show one, its hints, and check an answer: `shoal simulate exercise`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shoal.base.errors import ConfigError, nearest_word
from shoal.teach.exercises import first_questions, layout_questions, run_questions
from shoal.teach.exercises.exercise import Exercise, check_answer

WIDTH = 90


def all_exercises() -> dict[str, Exercise]:
    """Return all exercises by name, in the order of the pages.

    >>> list(all_exercises())[:3]
    ['why-1', 'why-2', 'ranks-1']
    """
    found = (
        *first_questions.questions(),
        *layout_questions.questions(),
        *run_questions.questions(),
    )
    return {one.name: one for one in found}


def find_exercise(name: str) -> Exercise:
    """Return the exercise of a name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    exercises = all_exercises()
    if name not in exercises:
        close = nearest_word(name, exercises) or next(iter(exercises))
        raise ConfigError(
            f"exercise {name}: there is no such exercise; try: shoal simulate exercise {close}"
        )
    return exercises[name]


def exercise_lines(words: Sequence[str]) -> list[str]:
    """Return the lines for `shoal simulate exercise [NAME [hint | ANSWER]]`.

    Raises:
        ConfigError: an unknown name.
        PlanError: a wrong answer, with its reason.

    >>> exercise_lines(["ranks-1", "5"])
    ['ranks-1: 5 is right. Rank = node rank · processes per node + local rank = 1 · 4 + 1.']
    """
    if not words:
        lines = [f"{one.name:<12}{one.question}" for one in all_exercises().values()]
        return [textwrap.shorten(line, WIDTH, placeholder=" …") for line in lines]
    exercise = find_exercise(words[0])
    if len(words) == 1:
        unit = f" (in {exercise.unit})" if exercise.unit else ""
        choices = f" ({' or '.join(exercise.choices)})" if exercise.choices else ""
        return [
            *textwrap.wrap(f"{exercise.question}{unit}{choices}", WIDTH),
            f"Answer: shoal simulate exercise {exercise.name} …",
            f"Hints:  shoal simulate exercise {exercise.name} hint",
        ]
    if words[1] == "hint":
        return [f"{place}. {hint}" for place, hint in enumerate(exercise.hints, 1)]
    return [check_answer(exercise, " ".join(words[1:]))]


def exercise_record(exercise: Exercise) -> dict[str, object]:
    """Return what a page needs to check an answer without a server."""
    return {
        "name": exercise.name,
        "answer": exercise.answer,
        "text": exercise.answer_text(),
        "because": exercise.because,
        "hints": list(exercise.hints),
        "mistakes": [list(pair) for pair in exercise.mistakes],
        "unit": exercise.unit,
        "choices": list(exercise.choices),
    }
