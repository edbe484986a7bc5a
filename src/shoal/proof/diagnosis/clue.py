"""A clue: where a layout first differs from one process, by how much, why, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

REPORT = "report it with proof.json (shoal prove run.toml --json > proof.json)"
"""What is left to do where nothing of the user's own can be the cause."""

OURS = f"{REPORT}: this is a mistake of Shoal, not of your model"


@dataclass(frozen=True)
class Clue:
    """A likely cause, in the words of someone who trains a model and does not know Shoal's source.

    Attributes:
        name: short and stable, for programs.
        parameter: the first tensor in which it shows, or the run's label.
        seen: what differs, with numbers.
        cause: what makes such numbers.
        advice: what to do next: a setting that does without, a part of one's own code, or a report.
    """

    name: str
    parameter: str
    seen: str
    cause: str
    advice: str

    def text(self) -> str:
        """Give the clue as one line for a person."""
        where = f"{self.parameter}: " if self.parameter else ""
        return f"{where}{self.seen}. Likely cause: {self.cause}. Next: {self.advice}"


def listed(numbers: list[int] | tuple[int, ...]) -> str:
    """Join numbers for a person.

    >>> listed([0, 1, 3]), listed([2])
    ('0, 1 and 3', '2')
    """
    *rest, last = [str(n) for n in numbers]
    return f"{', '.join(rest)} and {last}" if rest else last


def ranks_text(numbers: list[int] | tuple[int, ...]) -> str:
    """Name ranks for a person.

    >>> ranks_text([3]), ranks_text((0, 2))
    ('rank 3', 'ranks 0 and 2')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
