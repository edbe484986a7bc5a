"""A user's own program for a puzzle: read from a file, run under the rules, scored.

The file defines `async def program(m)`, the same for every rank; `m` is a `PuzzleRank`. It is code
that runs in this process, as a training script is: run only files that you would start with python.
"""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, PlanError
from shoal.base.plans.timeline import Timeline
from shoal.teach.puzzles import Puzzle, puzzle_run_timeline, score
from shoal.teach.puzzles.model import Program, PuzzleRank

FUNCTION = "program"


def load_program(path: str) -> Program:
    """Return the function `program` of a file.

    Raises:
        ConfigError: the file is missing, fails, or has no `async def program(m)`.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--program {path}: no such file; try: a file with async def program(m)")
    return program_of(file.read_text(encoding="utf-8"), f"--program {path}")


def program_of(code: str, name: str) -> Program:
    r"""Return the function `program` of a text.

    Args:
        name: of the text, for messages and tracebacks.

    Raises:
        ConfigError: the code fails, or has no `async def program(m)`.

    >>> program_of("async def program(m):\n    m.load(0)\n", "mine").__name__
    'program'
    """
    names: dict[str, Any] = {"__name__": "puzzle_program", "__file__": name}
    try:
        exec(compile(code, name, "exec"), names)
    except Exception as failure:
        raise ConfigError(f"{name}: {_failure_text(name, failure)}") from None
    found = names.get(FUNCTION)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"{name}: it has no async def {FUNCTION}(m); try: the first example of "
            "shoal docs puzzles"
        )
    return found


def run_on_ranks(puzzle: Puzzle, program: Program, name: str) -> list[PuzzleRank]:
    """Run a user's program on all ranks.

    Raises:
        ConfigError: its own code fails; the message has the line.
        PlanError: it breaks a rule of the puzzle, or its ranks wait for each other.
    """
    try:
        return puzzle.run_program(program)
    except PlanError:
        raise
    except Exception as failure:
        raise ConfigError(f"{name}: {_failure_text(name, failure)}") from None


def run_user_program(puzzle: Puzzle, path: str) -> tuple[Timeline, list[str]]:
    """Run a user's program; return its timeline and lines with its score beside the others.

    Raises:
        ConfigError: the file has no program, or its own code fails.
        PlanError: the program breaks a rule of the puzzle, or its ranks wait for each other.
    """
    models = run_on_ranks(puzzle, load_program(path), f"--program {path}")
    name = f"puzzle {puzzle.number}, {puzzle.title}: {Path(path).name}"
    return puzzle_run_timeline(models, name), score_lines(puzzle, models)


def score_lines(puzzle: Puzzle, models: list[PuzzleRank]) -> list[str]:
    """Return lines that compare a score with the target, the author's and Shoal's.

    >>> from shoal.teach.puzzles import PUZZLES
    >>> score_lines(PUZZLES[0], PUZZLES[0].reference())[-1]
    'The target is reached.'
    """
    own = score(models)
    rows = {
        "yours": own,
        "target": puzzle.target,
        "author": score(puzzle.reference()),
        "ours": score(puzzle.run_ours()),
    }
    lines = [
        f"{name:<8}{steps:>8g} steps {held:>12,.0f} numbers" for name, (steps, held) in rows.items()
    ]
    over = [
        f"{text} {got:{form}}, target {wanted:{form}}"
        for text, form, got, wanted in zip(
            ("steps", "numbers"), ("g", ",.0f"), own, puzzle.target, strict=True
        )
        if got > max(wanted, _allowed(puzzle, text))
    ]
    return [*lines, f"Over the target: {'; '.join(over)}." if over else "The target is reached."]


def _allowed(puzzle: Puzzle, text: str) -> float:
    """Return the author's own figure: some targets are rounded below it."""
    return puzzle.author[0 if text == "steps" else 1]


def _failure_text(path: str, failure: Exception) -> str:
    """Return an error of the user's code with its line, in one line."""
    if isinstance(failure, SyntaxError):
        where = f"line {failure.lineno}: " if failure.lineno else ""
        return f"{where}SyntaxError: {failure.msg}"
    frames = traceback.extract_tb(failure.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(failure).__name__}: {failure}".replace("\n", " ")
