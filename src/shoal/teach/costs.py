"""Cost tables of the event engine: the duration of each operation.

    PuzzleCosts      the LLM-Training-Puzzles: forward = backward = number of batches, update 0.5,
                     collectives 0.3 of any size, pass and receive 0.2 each, loss 0; unit: steps
    AnalyticalCosts  seconds per unit of work, and links as latency + bytes / bandwidth; a ring
                     moves 2(n − 1)/n · M in 2(n − 1) rounds (all-reduce) or half of both

Sources: github.com/srush/LLM-Training-Puzzles (MIT); Thakur et al. 2005 for the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.errors import PlanError, format_choice_error
from shoal.base.estimates.cluster import Link
from shoal.teach.engine import Op

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
PUZZLE_STEPS = {
    "update": 0.5, "all-reduce": 0.3, "reduce-scatter": 0.3, "all-gather": 0.3,
    "send": 0.2, "receive": 0.2, "loss": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class PuzzleCosts:
    """Durations by the puzzles' rules; `amount` of forward and backward is their number of batches.

    >>> table = PuzzleCosts()
    >>> table.seconds(Op("compute", "backward", amount=4)), table.seconds(Op("send", "send"))
    (4, 0.2)
    """

    def seconds(self, op: Op) -> float:
        """Return the steps of the puzzles' clock."""
        return op.amount if op.what in ("forward", "backward") else PUZZLE_STEPS[op.what]

    def travel_s(self, op: Op) -> float:
        """Return 0: a message can be received as soon as its send has ended."""
        return 0.0


@dataclass(frozen=True)
class AnalyticalCosts:
    """Durations from work at a rate, and from messages over a link.

    Attributes:
        unit_s: by kind of operation: seconds per unit of `amount` (for pipelines the seconds of one
            rank and micro-batch: forward, backward, input, weight).
        link: carries messages and collectives; None: they cost nothing.

    >>> from shoal.base.estimates.cluster import Link
    >>> table = AnalyticalCosts({"forward": 0.5}, Link("wire", 1e-3, 1e6))
    >>> table.seconds(Op("collective", "all-reduce", ranks=range(4), amount=2e6))
    3.006
    """

    unit_s: Mapping[str, float]
    link: Link | None = None

    @classmethod
    def for_pipeline(
        cls, forward_s: float, input_s: float, weight_s: float, link: Link | None = None
    ) -> AnalyticalCosts:
        """Return the costs of a pipeline: seconds per rank and micro-batch, all chunks together."""
        unit_s = {
            "forward": forward_s, "backward": input_s + weight_s, "input": input_s,
            "weight": weight_s,
        }  # fmt: skip
        return cls(unit_s, link)

    def seconds(self, op: Op) -> float:
        """Return the seconds on the lane; a send is free, as its message travels alone."""
        if op.kind in ("send", "receive"):
            return 0.0
        if op.kind == "collective" and op.what not in self.unit_s:
            return self._collective_s(op)
        if op.what not in self.unit_s:
            raise PlanError(format_choice_error("costs", op.what, self.unit_s))
        return self.unit_s[op.what] * op.amount

    def travel_s(self, op: Op) -> float:
        """Return latency + bytes / bandwidth."""
        return self.link.latency_s + op.amount / self.link.bytes_per_s if self.link else 0.0

    def _collective_s(self, op: Op) -> float:
        if self.link is None or len(op.ranks) < 2:
            return 0.0
        n = len(op.ranks)
        turns = 2 if op.what == "all-reduce" else 1
        sent = turns * (n - 1) / n * op.amount
        return turns * (n - 1) * self.link.latency_s + sent / self.link.bytes_per_s
