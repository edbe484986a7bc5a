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
from shoal.fabric.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic
from shoal.fabric.uneven_collectives import let_go, reduce_scatter


class GatherParameters:
    """All-gather of parameters, as `set_custom_all_gather` wants it."""

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
    """Reduce-scatter of gradients, as `set_custom_reduce_scatter` wants it.

    replicas   ranks that `fully_shard` sums each part over afterwards (hsdp), to count that too
    norms      of what this rank put in, since the reducer last began
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
        if input_tensor.is_cuda:
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        ranks, part = group.size(), output_tensor.numel()
        with self.traffic.waiting():
            cuts = [part * rank for rank in range(ranks + 1)]
            reduce_scatter(input_tensor, cuts, group.rank(), group).result(out=output_tensor)
        let_go(input_tensor)  # our `allocate` made it, and torch only keeps it until it was sent
        return None
