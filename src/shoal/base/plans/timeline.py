"""Timeline: activity and memory of every rank over time, as data that can be drawn.

The simulator makes it; the terminal, SVG and Chrome-trace views draw it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TimelineSpan:
    """One interval of time on one lane of one rank, as a timeline draws it.

    Attributes:
        kind: activity, which determines the colour: forward, backward, input, weight, update,
            compute, all-reduce, reduce-scatter, all-gather, broadcast, send, receive, wait, copy,
            checkpoint, failure.
        label: short text drawn inside.
        lane: "compute" or "link": they may overlap.
        note: a longer text for views that show one.
    """

    rank: int
    start_s: float
    end_s: float
    kind: str
    label: str = ""
    lane: str = "compute"
    note: str = ""


@dataclass(frozen=True)
class MemorySample:
    """Memory of a rank from `time_s` until its next `MemorySample`.

    Attributes:
        held_bytes: total, in the timeline's `held_unit`.
        parts: name → amount.
    """

    rank: int
    time_s: float
    held_bytes: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Spans and memory of all ranks; `unit` of the time axis: "s", or "steps" for puzzles.

    Attributes:
        facts: name → figure, printed under a drawing: makespan, bubble, peak.
        held_unit: unit of `memory`: "bytes", or a word (micro-batches, numbers).
        member: name of one row: rank, or island.
    """

    title: str
    ranks: int
    spans: tuple[TimelineSpan, ...]
    memory: tuple[MemorySample, ...] = ()
    unit: str = "s"
    facts: dict[str, str] = field(default_factory=dict)
    held_unit: str = "bytes"
    member: str = "rank"

    @property
    def end_s(self) -> float:
        """End of the last span.

        >>> Timeline("t", 1, (TimelineSpan(0, 0.0, 2.0, "forward"),)).end_s
        2.0
        """
        return max((span.end_s for span in self.spans), default=0.0)

    def peak_bytes(self, rank: int) -> float:
        """Return the peak memory of a rank."""
        return max((held.held_bytes for held in self.memory if held.rank == rank), default=0.0)
