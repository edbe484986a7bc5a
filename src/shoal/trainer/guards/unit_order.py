"""Compare over ranks which blocks' weights they gathered in a step, before its update.

Under fsdp and hsdp the k-th gather of a rank meets the k-th of the others, of whichever block. So
where one rank runs head `a` and another head `b`, both compute with a mixture of the two, and their
gradients are summed into each other. Every rank keeps a checksum of the blocks and passes in the
order of their collectives, for each mesh axis of these collectives (`parallel/unit_log.py`):

    dp_shard       gathers and reduced gradients      ranks of one group must be equal; other groups
    dp_replicate   gradients, summed over replicas    (hsdp, stages of a pipeline) may run others
    expert_*       the same, of experts under ep

The step's all-reduce compares the checksums (`step_vector.py`). If one differs, the ranks gather
their lists, and name the first difference.

Limits: if the numbers of collectives differ, ranks wait for each other, and the watchdog finds that
(`launch/watch/unit_mismatch.py`). Blocks that differ in an evaluation show there, or in the next
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.text.rank_differences import blocks_line
from shoal.fabric import World
from shoal.parallel.unit_log import UnitLog
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers


class UnitOrderGuard(Guard):
    """Guard against ranks of fsdp that run different blocks."""

    def __init__(self, log: UnitLog, world: World) -> None:
        self.log, self.world = log, world
        self._groups = [InvariantGroup(calls.ranks, world.rank) for calls in log.calls]

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return a checksum for each axis."""
        pairs = zip(self.log.calls, self._groups, strict=True)
        return [Invariant(f"units of {c.axis}", c.checksum, group) for c, group in pairs]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Compare the checksums and clear the log; step 0 is an evaluation.

        Raises:
            ConfigError: ranks of a group ran different blocks; the same on all ranks.
        """
        differs = [numbers.invariants.differs(f"units of {c.axis}") for c in self.log.calls]
        if any(differs):
            told = self.world.gather_json([[list(c.ranks), c.names] for c in self.log.calls])
            self.log.clear()
            when = f"step {step}" if step else "run.evaluate"
            raise ConfigError(_line(told, differs, when))
        self.log.clear()


def _line(told: Sequence[Sequence[Any]], differs: Sequence[bool], when: str) -> str:
    """Return the line for the first difference inside of a group.

    Args:
        told: by rank, for each axis the ranks of its group and the names of its calls.
        differs: for each axis, whether some group differs.
    """
    for axis, unlike in enumerate(differs):
        for rank, one in enumerate(told):
            ranks = one[axis][0]
            if not unlike or rank != ranks[0]:
                continue
            lists = {member: told[member][axis][1] for member in ranks}
            for calls in zip_longest(*lists.values(), fillvalue="no further block"):
                if len(set(calls)) > 1:
                    return blocks_line(dict(zip(lists, calls, strict=True)), when)
    return blocks_line({}, when)
