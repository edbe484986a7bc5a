"""Interface of the ranks that share a sequence, as attention over sequence parts uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shoal.parallel.spmd.autograd_collectives import Axis


class RingTransfer(Protocol):
    """Handle of a pending transfer around the ring."""

    def result(self) -> list[Tensor]:
        """Wait for the transfer and return the tensors of the rank before."""


class ContextAxis(Axis, Protocol):
    """Ranks that share a sequence: a `fabric.ring.Ring`, or a stand-in for it."""

    def pass_on(self, tensors: Sequence[Tensor]) -> RingTransfer:
        """Start to send tensors to the next rank and to receive those of the rank before."""

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r; return the received rows, by rank."""
