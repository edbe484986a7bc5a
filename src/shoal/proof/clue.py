"""A clue: what was seen in a difference, what makes such numbers, where to look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clue:
    """A likely cause.

    name   short and stable, for programs · parameter  the tensor it shows in, or the run's label
    seen   the observation, with numbers · cause  what makes such numbers · look  where to look
    """

    name: str
    parameter: str
    seen: str
    cause: str
    look: str

    def text(self) -> str:
        """One line for a person."""
        where = f"{self.parameter}: " if self.parameter else ""
        return f"{where}{self.seen}. Likely cause: {self.cause}. Look at: {self.look}"
