"""What a step-through is: a table of who holds what, changed step by step, with a check at its end.

The numbers in the cells are computed, never written: a walk that does not end in the right result
raises BugError instead of being shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.errors import BugError, PlanError
from shoal.base.plans.timeline import Timeline

LOOKS = {
    "own": "its own",
    "part": "sum of some ranks",
    "whole": "complete",
    "none": "not held",
    "busy": "on its way",
}
"""What the look of a cell says."""

MOST_RANKS = 16
"""More rows than this cannot be followed by eye."""


@dataclass(frozen=True)
class Cell:
    """What stands in one place of the table: a text, one of LOOKS, and from whom it just came."""

    text: str
    look: str = "own"
    came_from: int | None = None


@dataclass(frozen=True)
class Step:
    """One step: what happens, in words, and the table after it.

    Attributes:
        cells: [row][column].
        note: one more line under the table, "" for none.
    """

    title: str
    happens: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Walk:
    """A whole step-through.

    Attributes:
        story: what it is for and how it works, in two or three sentences.
        rows, columns: names of the table's rows (mostly ranks) and columns.
        start: the table before the first step.
        steps: in order.
        checked: what was compared at the end, and with what result.

    timeline the same steps over time
    """

    title: str
    story: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[Step, ...]
    checked: str
    start: tuple[tuple[Cell, ...], ...] = ()
    looks: dict[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    facts: dict[str, str] = field(default_factory=dict)


def check_ranks(what: str, ranks: int, least: int = 2) -> None:
    """Errors: PlanError for a number of ranks that this step-through cannot show."""
    if not least <= ranks <= MOST_RANKS:
        close = min(max(ranks, least), MOST_RANKS)
        raise PlanError(
            f"--ranks = {ranks}: {what} is shown with {least} to {MOST_RANKS} ranks; "
            f"try: --ranks {close}"
        )


def must_equal(what: str, got: object, wanted: object) -> None:
    """Errors: BugError where a computed result is not the right one.

    >>> must_equal("sum", 6, 6)
    """
    if got != wanted:
        raise BugError(f"step-through: {what} is {got}, must be {wanted}")
