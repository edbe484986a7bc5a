"""Ranks in a ring: each hands tensors on to the next one and gets the like from the one before.

After `size − 1` turns every rank has seen what every other one began with, and nobody ever held
more than two parts. A turn is under way while the caller computes: it is waited for when needed.

Source: the ring of Baidu's all-reduce (2017); for attention: Liu et al. 2023 (2310.01889)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoal.fabric.exchanges.point_to_point import PointToPoint, Transfer
from shoal.fabric.world import World

if TYPE_CHECKING:
    from shoal.fabric.collectives.uneven_collectives import PendingSum


class Turn:
    """A turn of the ring under way."""

    def __init__(self, sent: Sequence[Transfer], coming: Sequence[Transfer]) -> None:
        self.sent, self.coming = sent, coming

    def result(self) -> list[torch.Tensor]:
        """Wait; gives what came, and lets what was sent be changed."""
        came = [one.wait() for one in self.coming]
        for one in self.sent:
            one.wait()
        return came


class Ring:
    """The ranks of a world as a ring: `Ring(world)`, made on all of them together.

    pass_on(tensors)   begin to send tensors to the next rank and receive the like from the one
                       before; gives a Turn, whose `result()` waits and returns what came. Shapes
                       and formats are the same on every rank, and what is sent must not change
                       until then

    Attributes:
        all_reduce, all_gather, reduce_scatter, to_each: the world's, and `all_to_all.to_each`.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.messages = PointToPoint(world)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        self.world.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] of every rank to [size, ...]."""
        return self.world.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingSum:
        """Begin to sum a flat tensor of which rank r gets elements cuts[r] to cuts[r + 1]."""
        return self.world.reduce_scatter(tensor, cuts)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> Turn:
        """Begin a turn; the tensors must stay as they are until it is waited for.

        Args:
            tensors: of the same shapes and formats on every rank.
        """
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return Turn(
            [self.messages.send(one, following) for one in tensors],
            [self.messages.receive(tuple(one.shape), one.dtype, before) for one in tensors],
        )

    def to_each(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Rows for every rank, in order of the ranks; see `all_to_all.to_each`."""
        from shoal.fabric.exchanges.all_to_all import to_each  # a ring without masks does without

        return to_each(self.world, rows, sent, received)
