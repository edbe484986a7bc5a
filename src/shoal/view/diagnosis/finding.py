"""Finding of `shoal diagnose`: one failure of a run, or one cause that makes it slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.event_sentences import died_text


@dataclass(frozen=True)
class RunFinding:
    """One failure of a run, or one cause that makes it slower than need be.

    Attributes:
        kind: an event's name, "killed", or of advice "communication", "data" or "fragmentation".
        what: the failure, with its rank.
        why: the evidence.
        command: the next command to type; "" none.
        rank, step: where known.
        over: whether the run continued after it by itself.
        advice: nothing is wrong: the run could be faster, or differs from before (a resume).
    """

    kind: str
    what: str
    why: str
    command: str
    rank: int | None = None
    step: int | None = None
    over: bool = False
    advice: bool = False

    def record(self) -> Record:
        """Return the finding as a JSON object."""
        return asdict(self)


EventDiagnosis = Callable[[Record, list[Record], Path], RunFinding | None]
"""(an event, the events after it, the run folder) → finding; None: nothing is wrong."""


def death_line(event: Record) -> str:
    """Return one line on a rank's death; a report may lack its rank and its process.

    >>> death_line({"how": "exit code 1", "traceback": "E"})
    'a rank: exit code 1: E'
    """
    line = died_text(event)
    return line.replace(" (pid None)", "", 1).replace("rank None", "a rank", 1)


def step_of(event: Record) -> int | None:
    """Return an event's step, or None if it has none."""
    step = event.get("step")
    return step if isinstance(step, int) else None


def rank_of(event: Record) -> int | None:
    """Return the first rank that an event names, or None."""
    ranks = event.get("ranks")
    if isinstance(ranks, list) and ranks and isinstance(ranks[0], int):
        return ranks[0]
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None
