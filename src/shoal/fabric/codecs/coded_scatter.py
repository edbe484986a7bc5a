"""The sending half of a coded sum: every rank gives each peer its part of the bytes.

Source: pairwise all-to-all, Thakur et al. 2005
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from shoal.fabric.traffic import REDUCE_SCATTER
from shoal.fabric.world import World


@dataclass
class PendingRows:
    """An exchange under way; `source` is held until it is done."""

    work: dist.Work | None
    received: Tensor
    source: Tensor | None

    def result(self) -> Tensor:
        """Wait, then give what every rank had for this one: [ranks, own bytes], in their order."""
        if self.work is not None:
            self.work.wait()
        # A work that is kept would keep its process group alive beyond `destroy`.
        self.work = self.source = None
        return self.received


def exchange(world: World, packed: Tensor, sizes: Sequence[int]) -> PendingRows:
    """Begin to give every rank its part of everybody's bytes: the sending half of a sum.

    packed   [bytes], the parts for rank 0, 1, … one after another, each `sizes[rank]` long
    Counted as a reduce-scatter, which it is for those who then add up what they decode.
    """
    if world.group is None:
        return PendingRows(None, packed.unsqueeze(0), packed)
    world.traffic.count(REDUCE_SCATTER, packed.numel(), world.size)
    own = sizes[world.rank]
    received = packed.new_empty(world.size * own)
    work = dist.all_to_all_single(
        received, packed, [own] * world.size, list(sizes), world.group, async_op=True
    )
    return PendingRows(work, received.view(world.size, own), packed)
