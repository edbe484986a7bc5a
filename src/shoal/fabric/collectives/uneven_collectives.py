"""Reduce-scatter and all-gather of flat tensors with unequal parts, on gloo and NCCL.

gloo's own reduce-scatter sends as much as an all-reduce (measured: 1.00 and 1.50 × the tensor at 2
and 4 ranks, where 0.50 and 0.75 suffice). So on gloo every rank sends each peer that peer's part
(all-to-all) and adds up what it receives, always in the order of the ranks: the same bits whatever
arrives first. NCCL has both collectives; its own are used, in one call where parts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single


@dataclass
class PendingFlatReduceScatter:
    """Handle of a pending reduce-scatter; `result(out=None)` returns this rank's part of the sum.

    With `out`, `result` overwrites `out` and returns it. Call `result` once: it may free the
    received parts.

    Attributes:
        received: [ranks, own part], or [1, own part] where the backend has summed already.
        source: the tensor being sent, kept alive until the work is done.
    """

    work: dist.Work | None
    received: torch.Tensor
    source: torch.Tensor | None

    def result(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for this rank's part of the sum and return it, in `out` if given."""
        if self.work is not None:
            self.work.wait()
        # A reference to the work would keep its process group alive beyond `destroy`.
        self.work = self.source = None
        if self.received.shape[0] == 1:
            part = self.received[0]
            return part if out is None else out.copy_(part)
        if out is None:
            summed = torch.sum(self.received, 0)
        else:  # in the stored dtype; the received one may be narrower
            summed = torch.sum(self.received, 0, dtype=out.dtype, out=out)
        # A gloo thread keeps it until it runs again: milliseconds later on busy cores.
        self.received.untyped_storage().resize_(0)
        return summed


def reduce_scatter(
    tensor: torch.Tensor, cuts: Sequence[int], rank: int, group: dist.ProcessGroup
) -> PendingFlatReduceScatter:
    """Start a reduce-scatter; rank r gets the elements from cuts[r] to cuts[r + 1].

    Source: measured in docs/lab-log.md; pairwise all-to-all, Thakur et al. 2005.
    """
    sizes = _sizes(cuts)
    mine, ranks = sizes[rank], len(sizes)
    if tensor.device.type != "cpu":
        out = tensor.new_empty(mine)
        if len(set(sizes)) == 1:
            work = dist.reduce_scatter_tensor(out, tensor, group=group, async_op=True)
        else:
            work = dist.reduce_scatter(out, list(tensor.split(sizes)), group=group, async_op=True)
        return PendingFlatReduceScatter(work, out.unsqueeze(0), tensor)
    received = tensor.new_empty(ranks * mine)
    work = dist.all_to_all_single(received, tensor, [mine] * ranks, sizes, group, async_op=True)
    return PendingFlatReduceScatter(work, received.view(ranks, mine), tensor)


def all_gather_parts(
    tensor: torch.Tensor, cuts: Sequence[int], rank: int, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start an in-place all-gather; the elements from cuts[r] to cuts[r + 1] are rank r's."""
    sizes = _sizes(cuts)
    own = tensor[cuts[rank] : cuts[rank + 1]]
    if len(set(sizes)) == 1:
        # its own memory: gloo would read what it is writing
        return all_gather_single(tensor, own.clone(), group=group, async_op=True)
    if tensor.device.type != "cpu":
        return dist.all_gather(list(tensor.split(sizes)), own.clone(), group=group, async_op=True)
    ranks = len(sizes)
    return dist.all_to_all_single(
        tensor, own.repeat(ranks), sizes, [sizes[rank]] * ranks, group, async_op=True
    )


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
