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

LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger blocks are not kept: glibc maps each, and unmaps it when it is freed (mallopt(3))."""


class TransferBuffer:
    """Host memory that one transfer after another uses; it grows to the largest of them.

    Blocks that each step frees and allocates again make the heap of glibc 2.36 grow without end:
    torch aligns blocks, glibc asks for size + alignment, and the hole of a block of that size lacks
    the alignment. On devices torch's allocator keeps blocks itself.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._in_use = False

    @property
    def held_bytes(self) -> int:
        """Return the bytes that stay from one transfer to the next."""
        return 0 if self._block is None else self._block.numel()

    def acquire(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of arbitrary values, in the kept memory if that is released.

        A transfer that was given up may still write into its memory, so this is left to it.
        """
        size = elements * dtype.itemsize
        if device.type != "cpu" or size > LARGEST_KEPT_BYTES:
            return torch.empty(elements, dtype=dtype, device=device)
        if self._in_use or self._block is None or self._block.numel() < size:
            self._block = None  # freed before the larger one is allocated
            self._block = torch.empty(size, dtype=torch.uint8)
        self._in_use = True
        return self._block[:size].view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Accept back a tensor of `acquire`, or a view of all of it, after its transfer."""
        storage, block = tensor.untyped_storage(), self._block
        if block is not None and block.untyped_storage().data_ptr() == storage.data_ptr():
            self._in_use = False
        elif tensor.device.type == "cpu":
            storage.resize_(0)  # a gloo thread keeps it until it runs again


@dataclass
class PendingGather:
    """Handle of a pending all-gather.

    Attributes:
        sent: the copy of this rank's part.
        buffer: the memory of `sent`; None: its own.
    """

    work: dist.Work | None
    sent: torch.Tensor | None
    buffer: TransferBuffer | None

    def wait(self) -> None:
        """Wait until all parts have arrived, and release what was sent."""
        if self.work is not None:
            self.work.wait()
        if self.buffer is not None and self.sent is not None:
            self.buffer.release(self.sent)
        # A reference to the work would keep its process group alive beyond `destroy`.
        self.work = self.sent = None


@dataclass
class PendingFlatReduceScatter:
    """Handle of a pending reduce-scatter; `result(out=None)` returns this rank's part of the sum.

    With `out`, `result` overwrites `out` and returns it. Call `result` once: it frees or releases
    the received parts.

    Attributes:
        received: [ranks, own part], or [1, own part] where the backend has summed already.
        source: the tensor being sent, kept alive until the work is done.
        buffer: the memory of `received`; None: its own.
    """

    work: dist.Work | None
    received: torch.Tensor
    source: torch.Tensor | None
    buffer: TransferBuffer | None = None

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
        if self.buffer is not None:
            self.buffer.release(self.received)
        else:  # a gloo thread keeps it until it runs again: milliseconds later on busy cores
            self.received.untyped_storage().resize_(0)
        return summed


def reduce_scatter(
    tensor: torch.Tensor,
    cuts: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
    buffer: TransferBuffer | None = None,
) -> PendingFlatReduceScatter:
    """Start a reduce-scatter; rank r gets the elements from cuts[r] to cuts[r + 1].

    Args:
        tensor: flat; must not change until the result is read.
        cuts: boundaries of the ranks' parts.
        rank: this rank in the group.
        group: of gloo or NCCL.
        buffer: memory on the host for the received parts; None: allocate it.

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
    received = _allocate(ranks * mine, tensor, buffer)
    work = dist.all_to_all_single(received, tensor, [mine] * ranks, sizes, group, async_op=True)
    return PendingFlatReduceScatter(work, received.view(ranks, mine), tensor, buffer)


def all_gather_parts(
    tensor: torch.Tensor,
    cuts: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
    buffer: TransferBuffer | None = None,
    *,
    direct: bool = False,
) -> PendingGather:
    """Start an in-place all-gather; the elements from cuts[r] to cuts[r + 1] are rank r's.

    Args:
        tensor: flat; this rank's part is filled.
        cuts: boundaries of the ranks' parts.
        rank: this rank in the group.
        group: of gloo or NCCL.
        buffer: memory on the host for what is sent; None: allocate it.
        direct: on a host every rank sends its part to all others, as unequal parts always travel.
            gloo's all-gather of equal parts allocates the whole twice, but goes in a ring, which
            sends less between machines.
    """
    sizes, own = _sizes(cuts), tensor[cuts[rank] : cuts[rank + 1]]
    on_host = tensor.device.type == "cpu"
    equal = len(set(sizes)) == 1 and not (on_host and direct)
    # its own memory: gloo would read what it is writing
    copies = 1 if equal or not on_host else len(sizes)
    sent = _allocate(copies * own.numel(), own, buffer)
    sent.view(copies, own.numel()).copy_(own)
    if equal:
        work = all_gather_single(tensor, sent, group=group, async_op=True)
    elif not on_host:
        work = dist.all_gather(list(tensor.split(sizes)), sent, group=group, async_op=True)
    else:
        work = dist.all_to_all_single(
            tensor, sent, sizes, [sizes[rank]] * copies, group, async_op=True
        )
    return PendingGather(work, sent, buffer)


def _allocate(elements: int, like: torch.Tensor, buffer: TransferBuffer | None) -> torch.Tensor:
    """Return a flat tensor of arbitrary values with the dtype and device of another one."""
    if buffer is None:
        return like.new_empty(elements)
    return buffer.acquire(elements, like.dtype, like.device)


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
