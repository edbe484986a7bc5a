"""Ring exchange: each rank sends tensors to the next rank and receives from the previous one.

After `size − 1` turns every rank has received every other rank's tensors, and no rank ever held
more than two parts. A turn runs while the caller computes; the caller waits for it when it needs
the tensors.

Source: the ring of Baidu's all-reduce (2017); for attention: Liu et al. 2023 (2310.01889)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.fabric.exchanges.point_to_point import PointToPoint, Transfer
from shoal.fabric.world import World


class PendingRingTurn:
    """Handle of a pending ring turn."""

    def __init__(self, sent: Sequence[Transfer], coming: Sequence[Transfer]) -> None:
        self.sent, self.coming = sent, coming

    def result(self) -> list[torch.Tensor]:
        """Wait for the received tensors and return them; the sent tensors may change afterwards."""
        came = [one.wait() for one in self.coming]
        for one in self.sent:
            one.wait()
        return came


class Ring:
    """The ranks of a world as a ring: `Ring(world)`, created on all ranks together.

    pass_on(tensors)   start to send tensors to the next rank and receive as many from the previous
                       one; returns a Turn, whose `result()` waits and returns the received tensors.
                       Shapes and dtypes are the same on every rank, and the sent tensors must not
                       change until then

    Attributes:
        all_reduce, all_gather, reduce_scatter, to_each: the world's, and `all_to_all_cost.to_each`.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.all_reduce, self.all_gather = world.all_reduce, world.all_gather
        self.reduce_scatter = world.reduce_scatter
        self.messages = PointToPoint(world)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> PendingRingTurn:
        """Start a turn; the tensors must not change until its `result` returns.

        Args:
            tensors: tensors of the same shapes and dtypes on every rank.
        """
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return PendingRingTurn(
            [self.messages.send(one, following) for one in tensors],
            [self.messages.receive(tuple(one.shape), one.dtype, before) for one in tensors],
        )

    def all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Exchange rows all-to-all, in order of the ranks; see `all_to_all_cost.to_each`."""
        from shoal.fabric.exchanges.all_to_all import (
            all_to_all_rows,  # only rings with masks need it
        )

        return all_to_all_rows(self.world, rows, sent, received)
