"""Two tiers: islands of one region merge every round, all islands every so many rounds.

Islands 0 … n−1 form `regions` groups of neighbours. With `far_period` = F:

    rounds F−1, 2F−1, …  far    all islands:       D = mean of W_far − w_i
                                W_far, u_far ← outer optimizer(W_far, u_far, D);  W ← W_far;  u ← 0
    other rounds         near   of one region:     D = mean of W − w_i
                                W, u ← outer optimizer(W, u, D)

Both tiers use the same kind of outer optimizer with the same numbers, but each has its own memory
(momentum): u of what a region did since the last far merge, u_far of all that was merged far. The
far message spans everything since the last far merge, near merges included. Weights by tokens count
those of the far round itself, which at steady speeds are in the ratio of all.
The far merge ends the near tier's memory, so that after it every island holds the same W, u, W_far
and u_far: a run is resumed from there, also by another number of islands. Between far merges only
islands of one region hold the same, and only they compare digests.

Source: Kim et al. 2025 (HALoS): local and global servers with a momentum each; there merges are
asynchronous and the local momentum lives on
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from shoal.islands.outer_optimizer import Build, Outer

FAR = "far"
"""Marks the far tier's tensors in a checkpoint: NAME.far its weights, NAME.far_KEY its state."""


def is_far(round_number: int, far_period: int) -> bool:
    """Whether all islands merge in a round, counted from 0.

    >>> [round_number for round_number in range(9) if is_far(round_number, 3)]
    [2, 5, 8]
    """
    return (round_number + 1) % far_period == 0


def members(
    round_number: int, index: int, count: int, regions: int, far_period: int
) -> tuple[int, ...]:
    """The islands that merge with island `index` in a round, itself included.

    >>> members(0, 2, 4, 2, 3), members(2, 2, 4, 2, 3)
    ((2, 3), (0, 1, 2, 3))
    """
    if regions == 1 or is_far(round_number, far_period):
        return tuple(range(count))
    size = count // regions
    start = index // size * size
    return tuple(range(start, start + size))


class TwoTiers(Outer):
    """W and u of an island's region, and beside them those of all islands; see the module.

    `at` gives the one that a round merges: propose, commit and undo go to it.
    """

    def __init__(self, local: Mapping[str, Tensor], build: Build, far_period: int) -> None:
        super().__init__(local, build)
        self.far_period = far_period
        self._far = _Far(local, build, self)

    def at(self, round_number: int) -> Outer:
        """See `Outer.at`."""
        return self._far if is_far(round_number, self.far_period) else self

    def digest(self) -> str:
        """Of both tiers; in a near round the far one is as the last far merge left it."""
        both = super().digest() + self._far.own_digest()
        return hashlib.sha256(both.encode()).hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """See `Outer.tensors`; the far tier's are "NAME.far" and "NAME.far_KEY"."""
        found = super().tensors()
        for path, part in self._far.tensors().items():
            if path in self.weights:
                found[f"{path}.{FAR}"] = part
            else:
                name, key = path.rsplit(".", 1)
                found[f"{name}.{FAR}_{key}"] = part
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Outer.load`."""
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


class _Far(Outer):
    """What all islands merge; its steps put the near tier on the same weights."""

    def __init__(self, local: Mapping[str, Tensor], build: Build, near: TwoTiers) -> None:
        super().__init__(local, build)
        self._near = near

    def propose(self, mean: Mapping[str, Tensor]) -> bool:
        """See `Outer.propose`; of both tiers."""
        finite = super().propose(mean)
        return self._near.restart({name: self._held[name].detach() for name in mean}) and finite

    def commit(self) -> None:
        """See `Outer.commit`; of both tiers."""
        super().commit()
        self._near.commit()

    def undo(self) -> None:
        """See `Outer.undo`; of both tiers."""
        super().undo()
        self._near.undo()

    def digest(self) -> str:
        """Of both tiers."""
        return self._near.digest()

    def own_digest(self) -> str:
        """Of this tier alone."""
        return super().digest()
