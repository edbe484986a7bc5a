"""What attention over parts of a sequence asks of the ranks that share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shoal.parallel.spmd.autograd_collectives import Axis


class Turn(Protocol):
    """A turn of the ring under way."""

    def result(self) -> list[Tensor]:
        """Wait, then give what came from the rank before."""


class ContextAxis(Axis, Protocol):
    """The ranks that share a sequence: a `fabric.ring.Ring`, or a stand-in for it."""

    def pass_on(self, tensors: Sequence[Tensor]) -> Turn:
        """Begin to hand tensors on to the next rank and to get the like from the one before."""

    def to_each(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r; gives what came, by rank."""
