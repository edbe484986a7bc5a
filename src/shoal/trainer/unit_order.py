"""Compare over ranks which blocks' weights they gathered in a step, before its update.

Under fsdp and hsdp the k-th gather of a rank meets the k-th of the others, of whichever block. So
where one rank runs head `a` and another head `b`, both compute with a mixture of the two, and their
gradients are summed into each other. Every rank keeps a checksum of the blocks and passes in the
order of their collectives, for each axis along which they travel (`parallel/unit_log.py`):

    dp_shard       gathers and reduced gradients      ranks of one group must be alike; other groups
    dp_replicate   gradients, summed over replicas    (hsdp, stages of a pipeline) may run others
    expert_*       the same, of experts under ep

The checksums travel in the step's vector, one zero sum per axis (`step_vector.py`). Where a sum is
not 0 the ranks gather their lists, and name the first difference.

Limits: where the numbers of collectives differ ranks wait for each other, and a watch finds that
(`launch/unit_calls.py`). Blocks that differ in an evaluation show there, or in the next step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError
from shoal.base.unlike_ranks import blocks_line
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.step_vector import StepGuard, StepNumbers, zero_sum_term

if TYPE_CHECKING:  # layouts that gather nothing do without
    from shoal.parallel.unit_log import UnitLog

ENTRY = "unit_order"


def guards_of(program: Program, *others: StepGuard) -> list[StepGuard]:
    """Return the guards of a run's steps: before `others` that of a layout which gathers units."""
    if program.unit_log is None:
        return list(others)
    return [UnitOrderCheck(program.unit_log, program.world), *others]


class UnitOrderCheck:
    """Compares this rank's log with the others'; see `step_vector.StepGuard`."""

    def __init__(self, log: UnitLog, world: World) -> None:
        self.log, self.world = log, world

    def by_rank(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return nothing: sums over groups are enough."""
        return {}

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return this rank's term of each axis's sum."""
        rank, size = self.world.rank, self.world.size
        terms = [zero_sum_term(one.checksum, step, one.ranks, rank, size) for one in self.log.calls]
        return {ENTRY: [float(term) for term in terms]}

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Compare and begin anew; step 0 is an evaluation.

        Raises:
            ConfigError: the same on all ranks, where ranks of a group ran different blocks.
        """
        sums = numbers.sums(ENTRY)
        if any(sums):
            told = self.world.gather_json([[list(c.ranks), c.names] for c in self.log.calls])
            self.log.clear()
            when = f"step {step}" if step else "run.evaluate"
            raise ConfigError(_line(told, [bool(one) for one in sums], when))
        self.log.clear()


def _line(told: Sequence[Sequence[Any]], differs: Sequence[bool], when: str) -> str:
    """The line for the first difference inside of a group.

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
