"""All-gather and reduce-scatter for `fully_shard`, counted, and without gloo's detour.

`fully_shard` takes objects that allocate a buffer and run a collective on it. These add the sent
bytes to the world's traffic. On gloo the reduce-scatter is an all-to-all of equal parts plus a sum,
as in `uneven_collectives.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single, storage_address, storage_use_count
from shoal.fabric.collectives.traffic_counts import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WORLD,
    TrafficCounter,
)


def free_storage(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that owns its storage and has no further reader.

    A gloo thread keeps its sent and received tensors alive until it runs again, after `wait` has
    returned. On busy cores that takes several milliseconds, in which the next buffers add to the
    peak.
    """
    tensor.untyped_storage().resize_(0)


class BufferCache:
    """Reusable host buffers for tensors of one size.

    The kernel zeroes newly allocated memory page by page. A buffer is kept if the previous one had
    the same size; memory that a pass needs once is freed.
    """

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None
        self._last_bytes = 0

    def acquire(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of arbitrary values that owns its storage."""
        spare = self._spare
        if spare is not None and (spare.numel(), spare.dtype) == (elements, dtype):
            self._spare = None
            return spare
        if spare is not None:
            free_storage(spare)
            self._spare = None
        return torch.empty(elements, dtype=dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Accept back a tensor from `take`, or a view of all of it, for reuse."""
        if self._spare is not None:
            free_storage(self._spare)
        self._spare = tensor.view(-1) if tensor.nbytes == self._last_bytes else None
        self._last_bytes = tensor.nbytes
        if self._spare is None:
            free_storage(tensor)

    def drop(self) -> None:
        """Free the kept buffer."""
        if self._spare is not None:
            free_storage(self._spare)
        self._spare, self._last_bytes = None, 0


def _is_unshared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor alone owns its memory: no view and no collective refers to it."""
    count = storage_use_count
    # The second use is the storage that is asked here.
    return count is not None and count(storage_address(tensor.untyped_storage())) == 2


class GatherParameters:
    """All-gather for `FSDPModule.set_custom_all_gather`; `GatherParameters(traffic, axis)`.

    `allocate(size, *, dtype, device)` makes a buffer. A call runs the collective on a group and
    adds the bytes that this rank sends, (n−1)/n of the whole, to `traffic`; if it waits, its time
    too. On the CPU, units of one size share one buffer, or two if the next unit is prefetched,
    since the kernel zeroes newly allocated memory page by page.
    """

    def __init__(self, traffic: TrafficCounter, axis: str = WORLD) -> None:
        self.traffic, self.axis = traffic, axis
        self._kept: list[torch.Tensor] = []
        self._last: tuple[Any, ...] = ()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of `size` elements with arbitrary values."""
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        asked = (tuple(size), dtype)
        if asked != self._last:  # a unit gathered once a pass keeps no buffer
            self._kept, self._last = [], asked
            return torch.empty(*size, dtype=dtype)
        for buffer in self._kept:
            if _is_unshared(buffer):
                return buffer.detach()
        made = torch.empty(*size, dtype=dtype)
        self._kept = [*self._kept[-1:], made]
        return made.detach()

    def drop(self) -> None:
        """Free the buffers kept for further units, after a pass."""
        self._kept, self._last = [], ()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Run the all-gather and count its traffic."""
        gathered_bytes = output_tensor.numel() * output_tensor.element_size()
        self.traffic.count(ALL_GATHER, gathered_bytes, group.size(), self.axis)
        if async_op:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        with self.traffic.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group)


class ScatterGradients:
    """Reduce-scatter (sum) for `FSDPModule.set_custom_reduce_scatter`, counted.

    Args:
        traffic: counter of its bytes and waits.
        replicas: ranks over which `fully_shard` sums each part afterwards (hsdp), to count that
            all-reduce too.
        axes: axis of the group and, if there are replicas, theirs before it.

    Attributes:
        norms: norms of this rank's inputs, one per call; the reducer empties it at the start of a
            step.

    Note:
        It ignores `op`. On the CPU it waits for the sum, adds in the order of the ranks, and keeps
        the input's memory for the next unit of its size. On CUDA it is NCCL's collective.
    """

    def __init__(
        self, traffic: TrafficCounter, replicas: int, axes: Sequence[str] = (WORLD,)
    ) -> None:
        self.traffic, self.axes = traffic, axes
        self.replicas = replicas
        self.norms: list[torch.Tensor] = []
        self._sent, self._received = BufferCache(), BufferCache()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of `size` elements with arbitrary values."""
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return self._sent.acquire(math.prod(size), dtype).view(*size)

    def drop(self) -> None:
        """Free the buffers kept for further units, after a pass."""
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
        """Reduce-scatter by sum over the group; `op` is ignored, FSDP passes a sum."""
        self.norms.append(torch.linalg.vector_norm(input_tensor))
        input_bytes = input_tensor.numel() * input_tensor.element_size()
        self.traffic.count(REDUCE_SCATTER, input_bytes, group.size(), self.axes[-1])
        own_bytes = output_tensor.numel() * output_tensor.element_size()
        self.traffic.count(ALL_REDUCE, own_bytes, self.replicas, self.axes[0])
        if input_tensor.device.type != "cpu":
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        with self.traffic.waiting():
            received = self._received.acquire(input_tensor.numel(), input_tensor.dtype)
            dist.all_to_all_single(received, input_tensor.view(-1), group=group)
            # [ranks, own part], added in this order
            parts = received.view(group.size(), output_tensor.numel())
            torch.sum(parts, 0, dtype=output_tensor.dtype, out=output_tensor)
            self._received.release(received)
        # `allocate` made it; torch holds it until it was sent, and does not look at it again.
        self._sent.release(input_tensor)
        return None
