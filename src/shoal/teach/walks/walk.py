"""Step-through: a table of each rank's values, changed step by step, with a final check.

The numbers in the cells are computed, never written by hand: a walk that does not end in the right
result raises BugError instead of being shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from shoal.base.errors import BugError, PlanError
from shoal.base.plans.timeline import Timeline

LOOKS = {
    "own": "its own",
    "part": "sum of some ranks",
    "whole": "complete",
    "none": "not held",
    "busy": "on its way",
}
"""Meaning of a cell's look."""

MOST_RANKS = 16
"""Most rows that can be followed by eye."""

MANY_ROWS = 8
"""Rows from which equal rounds are left out."""


@dataclass(frozen=True)
class TableCell:
    """One cell of the table: a text, one of LOOKS, and the rank from which it just arrived."""

    text: str
    look: str = "own"
    came_from: int | None = None


@dataclass(frozen=True)
class WalkStep:
    """One step: a description in words, and the table after it.

    Attributes:
        cells: [row][column].
        note: one more line under the table, "" for none.
    """

    title: str
    happens: tuple[str, ...]
    cells: tuple[tuple[TableCell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class StepThrough:
    """A whole step-through.

    Attributes:
        story: its purpose and mechanism, in two or three sentences.
        rows, columns: names of the table's rows (mostly ranks) and columns.
        start: the table before the first step.
        steps: in order.
        checked: the comparison at the end, and its result.
        timeline: the same steps over time.
    """

    title: str
    story: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[WalkStep, ...]
    checked: str
    start: tuple[tuple[TableCell, ...], ...] = ()
    looks: dict[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    facts: dict[str, str] = field(default_factory=dict)


def select_steps(walk: StepThrough) -> list[WalkStep | int]:
    """Return the steps to show: of many equal rounds the first two and the last.

    A number stands for that many omitted rounds.
    """
    if len(walk.rows) <= MANY_ROWS:
        return list(walk.steps)
    shown: list[WalkStep | int] = []
    for _, phase in groupby(walk.steps, key=lambda step: step.title.rpartition(", ")[2]):
        alike = list(phase)
        if len(alike) <= 4:
            shown += alike
        else:
            shown += [*alike[:2], len(alike) - 3, alike[-1]]
    return shown


def check_ranks(what: str, ranks: int, least: int = 2) -> None:
    """Refuse a number of ranks that a step-through cannot show.

    Raises:
        PlanError: fewer than `least` ranks, or too many.
    """
    if not least <= ranks <= MOST_RANKS:
        close = min(max(ranks, least), MOST_RANKS)
        raise PlanError(
            f"--ranks = {ranks}: {what} is shown with {least} to {MOST_RANKS} ranks; "
            f"try: --ranks {close}"
        )


def check_equal(what: str, got: object, wanted: object) -> None:
    """Raise BugError if a computed result differs from the expected one.

    Raises:
        BugError: `got` is not `wanted`.

    >>> check_equal("sum", 6, 6)
    """
    if got != wanted:
        raise BugError(f"step-through: {what} is {got}, must be {wanted}")
