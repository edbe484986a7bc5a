"""A clue: the first difference of a layout from one process, its size, cause and remedy."""

from __future__ import annotations

from dataclasses import dataclass

PROVE_CONFIG = "shoal prove run.toml --json"
SCRIPT = "-- SCRIPT"
PROVE_SCRIPT = f"shoal prove --json {SCRIPT}"
"""Commands that write the report of a proof: of a run.toml, and of a loop of the user's own."""

REPORT = f"report it with proof.json ({PROVE_CONFIG} > proof.json)"
"""Advice if no part of the user's own code can be the cause."""

OURS = f"{REPORT}: this is a mistake of Shoal, not of your model"


@dataclass(frozen=True)
class Clue:
    """A likely cause, in words for a user who trains a model and does not know Shoal's source.

    Attributes:
        name: short and stable, for programs.
        parameter: the first tensor that shows it, or the run's label.
        seen: the difference, with numbers.
        cause: what makes such numbers.
        advice: what to do next: a setting that avoids it, a part of the user's own code, or a
            report.
    """

    name: str
    parameter: str
    seen: str
    cause: str
    advice: str

    def text(self) -> str:
        """Return the clue as one line for a person."""
        where = f"{self.parameter}: " if self.parameter else ""
        return f"{where}{self.seen}. Likely cause: {self.cause}. Next: {self.advice}"


def join_numbers(numbers: list[int] | tuple[int, ...]) -> str:
    """Join numbers for a person.

    >>> join_numbers([0, 1, 3]), join_numbers([2])
    ('0, 1 and 3', '2')
    """
    *rest, last = [str(n) for n in numbers]
    return f"{', '.join(rest)} and {last}" if rest else last


def format_ranks(numbers: list[int] | tuple[int, ...]) -> str:
    """Return the names of ranks for a person.

    >>> format_ranks([3]), format_ranks((0, 2))
    ('rank 3', 'ranks 0 and 2')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {join_numbers(numbers)}"
