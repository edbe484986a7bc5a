"""Print findings of ranks other than rank 0 in a run's first steps.

    rank 0: every sample has its mask full    → nothing to report
    rank 1: some tokens are masked            → "loss: a mean over a mask …"

A guard prints by rank 0, since most findings are the same on every rank. Samples are not: a mistake
in the loss may show on the rows of one rank alone. So every rank keeps the lines of its guards, and
their hash travels with the step's all-reduce. Ranks gather the lines only if they differ. Rank 0
then prints each line that nobody printed, once, with the rank. Two lines that differ in numbers
alone are one finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.parallel.program import Program
from shoal.trainer.guards.guard import Guard
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers

STEPS = 5
"""Steps of a process whose findings are compared: those of one step travel with the next."""
NAME = "findings"
NUMBER = re.compile(r"\d[\d.,e+-]*")


class RankFindings(Guard):
    """Guard that prints the findings of all ranks.

    Args:
        program: the run's.
        recorder: prints lines, keeps events.
    """

    def __init__(self, program: Program, recorder: MetricsRecorder) -> None:
        self.world, self.recorder = program.world, recorder
        self._everyone = InvariantGroup(range(self.world.size), self.world.rank)
        self._steps_left = STEPS if self.world.size > 1 else 0
        self._found: dict[str, tuple[str, bool]] = {}
        self._sent: dict[str, tuple[str, bool]] = {}
        self._printed = set[str]()

    def notice(self, text: str) -> None:
        """Print a line by rank 0, and keep it on every rank."""
        self.recorder.notice(text)
        if self._steps_left:
            self._found.setdefault(NUMBER.sub("#", text), (text, self.world.is_first))

    def emit_rank_notice(self, text: str) -> None:
        """Print a line about this rank; there is nothing left to compare."""
        self.recorder.emit_rank_notice(text)

    def due(self, step: int) -> bool:
        """Return True in the first steps."""
        return self._steps_left > 0

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return the findings since the step before, without their numbers."""
        self._sent |= self._found
        self._found = {}
        return [Invariant(NAME, sorted(self._sent), self._everyone)]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Print the lines that other ranks have and nobody printed; rank 0 prints them."""
        self._steps_left -= 1
        found, self._sent = self._sent, {}
        if not numbers.invariants.differs(NAME):
            self._printed |= found.keys()
            return
        by_rank = self.world.gather_json(found)
        for one in by_rank:
            self._printed |= {key for key, (_, printed) in one.items() if printed}
        for rank, one in enumerate(by_rank):
            for key, (text, _) in one.items():
                if key not in self._printed:
                    self._printed.add(key)
                    self.recorder.notice(f"rank {rank}: {text}")
