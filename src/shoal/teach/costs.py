"""Cost tables of the event engine: the duration of each operation.

    PuzzleCosts      the LLM-Training-Puzzles: forward = backward = number of batches, update 0.5,
                     collectives 0.3 of any size, pass and receive 0.2 each, loss 0; unit: steps
    AnalyticalCosts  seconds per unit of work; messages cost nothing

Source: github.com/srush/LLM-Training-Puzzles (MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.errors import PlanError, check_choice
from shoal.teach.engine import Op

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


@dataclass(frozen=True)
class AnalyticalCosts:
    """Durations from work at a rate; messages cost nothing.

    Attributes:
        unit_s: by kind of operation: seconds per unit of `amount` (for pipelines the seconds of one
            rank and micro-batch: forward, backward, input, weight).

    >>> AnalyticalCosts({"forward": 0.5}).seconds(Op("compute", "forward", amount=4))
    2.0
    """

    unit_s: Mapping[str, float]

    @classmethod
    def for_pipeline(cls, forward_s: float, input_s: float, weight_s: float) -> AnalyticalCosts:
        """Return the costs of a pipeline: seconds per rank and micro-batch, all chunks together."""
        unit_s = {
            "forward": forward_s, "backward": input_s + weight_s, "input": input_s,
            "weight": weight_s,
        }  # fmt: skip
        return cls(unit_s)

    def seconds(self, op: Op) -> float:
        """Return the seconds on the lane."""
        if op.kind in ("send", "receive"):
            return 0.0
        check_choice("costs", op.what, self.unit_s, kind=PlanError)
        return self.unit_s[op.what] * op.amount
