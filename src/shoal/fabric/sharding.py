"""The two collectives under fully sharded parameters, counted, and without gloo's detour.

`fully_shard` takes objects that allocate a buffer and run a collective on it. These add what is
sent to the world's traffic; on gloo the reduce-scatter is all-to-all plus a sum (see `parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single
from shoal.fabric.device import is_accelerator
from shoal.fabric.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic
from shoal.fabric.uneven_collectives import let_go, reduce_scatter


class GatherParameters:
    """The all-gather that `FSDPModule.set_custom_all_gather` wants; `GatherParameters(traffic)`.

    `allocate(size, *, dtype, device)` makes a buffer; calling it runs the collective on a group and
    adds the bytes that this rank sends, (n−1)/n of the whole, to `traffic`, and, if it waits, its
    time.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

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
    norms      of what this rank put in, one per call; the reducer empties it as a step begins
    Limits     its `op` is not looked at. On the CPU it waits for the sum, adds up in the order of
               the ranks, and then frees the input's memory; on CUDA it is NCCL's own
    """

    def __init__(self, traffic: Traffic, replicas: int) -> None:
        self.traffic = traffic
        self.replicas = replicas
        self.norms: list[torch.Tensor] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

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
            reduce_scatter(input_tensor, cuts, group.rank(), group).result(out=output_tensor)
        let_go(input_tensor)  # our `allocate` made it, and torch only keeps it until it was sent
        return None
