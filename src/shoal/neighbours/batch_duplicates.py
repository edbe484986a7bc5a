"""Report ranks that train on the same batches in a loop of another library.

A plain `DataLoader` shows every rank the whole dataset, in the same order where seeds are equal.
Such a loop trains, and every sample counts once per rank: n ranks do the work of one. The first
steps' inputs are therefore compared over ranks, as those of `run.step` are
(trainer/guards/batch_consistency.py).
The check prints one line, and training goes on: a benchmark on made-up data rightly does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.data.loading.dataset_kind import digest_of
from shoal.trainer.guards.batch_consistency import LOOKS
from shoal.trainer.guards.reports.own_loaders import CHANCE_BITS, count_information_bits
from shoal.trainer.run import Run


class EqualBatchesCheck:
    """Comparison of the ranks' model inputs in the first steps.

    Ends with the first step whose inputs differ on all ranks, and after `LOOKS` steps. Inputs of
    few different values may be equal by chance: they are compared over several steps.
    """

    def __init__(self, run: Run, near: str, deals: Callable[[], bool]) -> None:
        """Start the check.

        Args:
            run: the run; of one rank there is nothing to compare.
            near: advice at the line's end.
            deals: returns whether a loader of the facade supplies these batches.
        """
        self.run, self.near, self.deals = run, near, deals
        self.left = LOOKS if run.world.size > 1 else 0
        self.equal_bits = 0.0
        self._digests: list[str] = []
        self._bits = 0.0

    def add(self, inputs: Any) -> None:
        """Record the inputs of a forward pass in training."""
        if self.left:
            self._digests.append(digest_of(inputs))
            self._bits += count_information_bits(inputs)

    def compare(self) -> None:
        """Compare the inputs of the last step; every rank calls it after its update."""
        if not self.left:
            return
        self.left -= 1
        mine = [digest_of(self._digests), self._bits]
        self._digests, self._bits = [], 0.0
        found = self.run.world.gather_json(mine)
        digests = [digest for digest, _ in found]
        if len(set(digests)) == len(digests):
            self.left = 0
            return
        self.equal_bits += min(bits for _, bits in found)
        if self.equal_bits < CHANCE_BITS:
            return
        self.left = 0
        again = next(rank for rank, one in enumerate(digests) if one in digests[:rank])
        first = digests.index(digests[again])
        if not self.deals():
            self.run.recorder.notice(
                f"step {self.run.step_count}: ranks {first} and {again} got "
                f"the same samples, so that each counts more than once (a DataLoader without a "
                f"DistributedSampler gives every rank all of the data); training goes on; try: "
                f"{self.near}"
            )
