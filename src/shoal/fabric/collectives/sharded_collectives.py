"""The two collectives under fully sharded parameters, counted, and without gloo's detour.

`fully_shard` takes objects that allocate a buffer and run a collective on it. These add what is
sent to the world's traffic; on gloo the reduce-scatter is all-to-all plus a sum (see `parts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single, is_unshared
from shoal.fabric.collectives.traffic_counts import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic
from shoal.fabric.collectives.uneven_collectives import let_go, reduce_scatter
from shoal.fabric.device import is_accelerator


class SpareBuffer:
    """Memory of the host that tensors of one size take turns with.

    Memory that is asked for anew is zeroed by the kernel, page by page. A buffer is kept where the
    one before it was as large: what a pass needs once is given back.
    """

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None
        self._last_bytes = 0

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Give a flat tensor whose numbers are arbitrary, and that owns its storage."""
        spare = self._spare
        if spare is not None and (spare.numel(), spare.dtype) == (elements, dtype):
            self._spare = None
            return spare
        if spare is not None:
            let_go(spare)
            self._spare = None
        return torch.empty(elements, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what `take` gave, or a view of all of it; nobody looks at it any more."""
        if self._spare is not None:
            let_go(self._spare)
        self._spare = tensor.view(-1) if tensor.nbytes == self._last_bytes else None
        self._last_bytes = tensor.nbytes
        if self._spare is None:
            let_go(tensor)

    def drop(self) -> None:
        """Give back what is kept."""
        if self._spare is not None:
            let_go(self._spare)
        self._spare, self._last_bytes = None, 0


class GatherParameters:
    """The all-gather that `FSDPModule.set_custom_all_gather` wants; `GatherParameters(traffic)`.

    `allocate(size, *, dtype, device)` makes a buffer; calling it runs the collective on a group and
    adds the bytes that this rank sends, (n−1)/n of the whole, to `traffic`, and, if it waits, its
    time. On the CPU units of one size take turns with one buffer, or two where the next unit is
    gathered early: memory that is asked for anew is zeroed by the kernel, page by page.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._kept: list[torch.Tensor] = []
        self._last: tuple[Any, ...] = ()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Give a buffer of `size` elements whose numbers are arbitrary."""
        if is_accelerator(device):
            return torch.empty(*size, dtype=dtype, device=device)
        asked = (tuple(size), dtype)
        if asked != self._last:  # what is gathered once a pass is not kept for the next pass
            self._kept, self._last = [], asked
            return torch.empty(*size, dtype=dtype)
        for buffer in self._kept:
            if is_unshared(buffer):
                return buffer.detach()
        made = torch.empty(*size, dtype=dtype)
        self._kept = [*self._kept[-1:], made]
        return made.detach()

    def drop(self) -> None:
        """Give back what is kept for further units: the pass is over."""
        self._kept, self._last = [], ()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Run it and count it."""
        gathered_bytes = output_tensor.numel() * output_tensor.element_size()
        self.traffic.count(ALL_GATHER, gathered_bytes, group.size())
        if async_op:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        with self.traffic.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group)


class ScatterGradients:
    """The reduce-scatter (sum) that `FSDPModule.set_custom_reduce_scatter` wants, counted.

    Takes      traffic, where its bytes and waits are added · replicas, ranks over which
               `fully_shard` sums each part afterwards (hsdp), to count that all-reduce too

    Attributes:
        norms: of what this rank put in, one per call; the reducer empties it as a step begins.

    Note:
        its `op` is not looked at. On the CPU it waits for the sum, adds up in the order of the
        ranks, and keeps the input's memory for a next unit of its size; on CUDA it is NCCL's own.
    """

    def __init__(self, traffic: Traffic, replicas: int) -> None:
        self.traffic = traffic
        self.replicas = replicas
        self.norms: list[torch.Tensor] = []
        self._sent, self._received = SpareBuffer(), SpareBuffer()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Give a buffer of `size` elements whose numbers are arbitrary."""
        if is_accelerator(device):
            return torch.empty(*size, dtype=dtype, device=device)
        return self._sent.take(math.prod(size), dtype).view(*size)

    def drop(self) -> None:
        """Give back what is kept for further units: the pass is over."""
        self._sent.drop()
        self._received.drop()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum over the group, whatever `op` says: it is told to be a sum."""
        self.norms.append(torch.linalg.vector_norm(input_tensor))
        input_bytes = input_tensor.numel() * input_tensor.element_size()
        self.traffic.count(REDUCE_SCATTER, input_bytes, group.size())
        own_bytes = output_tensor.numel() * output_tensor.element_size()
        self.traffic.count(ALL_REDUCE, own_bytes, self.replicas)
        if is_accelerator(input_tensor.device):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        ranks, part = group.size(), output_tensor.numel()
        with self.traffic.waiting():
            cuts = [part * rank for rank in range(ranks + 1)]
            into = self._received.take(input_tensor.numel(), input_tensor.dtype)
            back = self._received.give
            reduce_scatter(input_tensor, cuts, group.rank(), group, into, back).result(
                output_tensor
            )
        # `allocate` made it; torch holds it until it was sent, and does not look at it again.
        self._sent.give(input_tensor)
        return None
