"""Style in which `shoal data look` prints rows: width, colours, marks of learnt tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowStyle:
    """Style of the rows of one output.

    Attributes:
        width: columns of the terminal.
        coloured: learnt tokens are green and underlined; else between ⟦ and ⟧.
        with_ids: list tokens in columns.
        encoding: of the output; one without ⟦ gets [[ and ]].
    """

    width: int = 80
    coloured: bool = False
    with_ids: bool = False
    encoding: str = "utf-8"

    @property
    def marks(self) -> tuple[str, str]:
        """Text before and after learnt tokens."""
        try:
            "⟦⟧".encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return "[[", "]]"
        return "⟦", "⟧"

    @property
    def legend(self) -> str:
        """Line that says how learnt tokens are marked in the texts below it."""
        if self.coloured:
            return "green and underlined: tokens that have a loss"
        return f"{self.marks[0]} {self.marks[1]}: around tokens that have a loss"
