"""Two tiers of merges: within a region every round, across all islands every F rounds.

Islands 0 … n−1 form `regions` groups of neighbours. With `far_period` = F:

    rounds F−1, 2F−1, …  far    all islands:       D = mean of W_far − w_i
                                W_far, u_far ← outer optimizer(W_far, u_far, D);  W ← W_far;  u ← 0
    other rounds         near   of one region:     D = mean of W − w_i
                                W, u ← outer optimizer(W, u, D)

Both tiers use the same kind of outer optimizer with the same numbers, but each has its own
momentum: u of a region since the last far merge, u_far of all far merges. The far message spans all
changes since the last far merge, near merges included. Weights by tokens count those of the far
round itself, which at steady speeds have the ratio of all. The far merge resets the near tier's
momentum, so that after it every island holds the same W, u, W_far and u_far. A run resumes from
there, also with another number of islands. Between far merges only islands of one region hold the
same state, and only they compare digests.

A model in fragments takes both tiers fragment by fragment. In a far round the regions still differ
in the fragments whose turn has not come, so all islands compare the far tier alone. After the last
fragment they hold the same state again.

Source: Kim et al. 2025 (HALoS): local and global servers with a momentum each; there merges are
asynchronous and the local momentum lives on
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from shoal.islands.outer_optimizer import Build, OuterState

FAR = "far"
"""Suffix of the far tier's tensors in a checkpoint: NAME.far weights, NAME.far_KEY state."""


def is_global_round(round_number: int, far_period: int) -> bool:
    """Return whether all islands merge in a round, counted from 0.

    >>> [round_number for round_number in range(9) if is_global_round(round_number, 3)]
    [2, 5, 8]
    """
    return (round_number + 1) % far_period == 0


def list_partners(
    round_number: int, index: int, count: int, regions: int, far_period: int
) -> tuple[int, ...]:
    """Return the islands that merge with island `index` in a round, itself included.

    >>> list_partners(0, 2, 4, 2, 3), list_partners(2, 2, 4, 2, 3)
    ((2, 3), (0, 1, 2, 3))
    """
    if regions == 1 or is_global_round(round_number, far_period):
        return tuple(range(count))
    size = count // regions
    start = index // size * size
    return tuple(range(start, start + size))


class TwoTierOuterState(OuterState):
    """W and u of an island's region, and those of all islands; see the module.

    `at` returns the tier that a round merges, which has propose, commit and undo.
    """

    def __init__(self, local: Mapping[str, Tensor], build: Build, far_period: int) -> None:
        super().__init__(local, build)
        self.far_period = far_period
        self._far = _GlobalOuterState(local, build, self)

    def at(self, round_number: int) -> OuterState:
        """Return the tier that a round (from 0) merges: all islands', or the region's."""
        return self._far if is_global_round(round_number, self.far_period) else self

    def digest(self) -> str:
        """Return the digest of both tiers; between far merges the far tier does not change."""
        both = super().digest() + self._far.own_digest()
        return hashlib.sha256(both.encode()).hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return committed W and u of both tiers; names of the far tier: NAME.far, NAME.far_KEY."""
        found = super().tensors()
        for path, part in self._far.tensors().items():
            if path in self.weights:
                found[f"{path}.{FAR}"] = part
            else:
                name, key = path.rsplit(".", 1)
                found[f"{name}.{FAR}_{key}"] = part
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load both tiers from the result of `tensors`; after an error neither has changed."""
        near: dict[str, Tensor] = {}
        far: dict[str, Tensor] = {}
        for path, part in tensors.items():
            name, _, key = path.rpartition(".")
            if name not in self.weights or key.partition("_")[0] != FAR:
                near[path] = part
            elif key == FAR:
                far[name] = part
            else:
                far[f"{name}.{key.removeprefix(f'{FAR}_')}"] = part
        self._sorted(near)  # or one tier would be loaded and the other not
        self._far.load(far)
        super().load(near)


class _GlobalOuterState(OuterState):
    """Outer weights of all islands; its steps set the weights of the region to the same values."""

    def __init__(self, local: Mapping[str, Tensor], build: Build, near: TwoTierOuterState) -> None:
        super().__init__(local, build)
        self._near = near

    def propose(self, mean: Mapping[str, Tensor]) -> bool:
        """Step the outer optimizer of all islands, and propose its W' for the region too.

        Args:
            mean: parameter → mean message of all islands, as for `OuterState.propose`.

        Returns:
            True if all new numbers of both tiers are finite.
        """
        finite = super().propose(mean)
        return self._near.restart({name: self._held[name].detach() for name in mean}) and finite

    def commit(self) -> None:
        """Install the proposed W and u of both tiers."""
        super().commit()
        self._near.commit()

    def undo(self) -> None:
        """Restore both tiers as before `propose`, bit for bit."""
        super().undo()
        self._near.undo()

    def digest(self) -> str:
        """Return the digest of both tiers."""
        return self._near.digest()

    def own_digest(self) -> str:
        """Return the digest of this tier alone."""
        return super().digest()

    def vote_digest(self) -> str:
        """Return the digest of this tier: the regions differ until their last fragment comes."""
        return self.own_digest()
