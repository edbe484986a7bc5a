"""How many bytes a rank sends per optimizer step, by the arithmetic of each data-parallel layout.

With n ranks over which something is split, r replicas of that, A micro-batches per rank and step,
G bytes of gradients and W of weights:

    ddp             2(n−1)/n · G                             one all-reduce
    zero1           (n−1)/n · (G + W)                        reduce-scatter, then all-gather
    zero2           (n−1)/n · (A·G + W)                      a reduce-scatter per micro-batch
    fsdp            A · (n−1)/n · (2·units + root + G)       units gathered twice per micro-batch
    hsdp            fsdp, and A · 2(r−1)/r · G/n             parts all-reduced over replicas

With `defer_sync` gradients travel once: zero2 sends what zero1 does, fsdp and hsdp have A = 1 in
the terms with G. Of the step's own few numbers (loss, counts, norm) and of padding nothing is said
here: give `gradient_bytes` and the others with their padding if it matters.

Source: Rajbhandari et al. 2020 (ZeRO), §7; Thakur et al. 2005 for what a collective sends. The
tests hold it against the kernel's counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.base.facts import ParameterFacts
from shoal.base.layout import Layout


@dataclass(frozen=True)
class Payload:
    """What a model makes travel, in bytes of the format in which it travels.

    gradient_bytes   of all trainable parameters
    weight_bytes     of those the optimizer steps under zero1 and zero2
    unit_bytes       zero 3: weights in blocks that are gathered before forward and before backward,
                     frozen ones too
    root_bytes       zero 3: weights in no such block, gathered once per micro-batch
    """

    gradient_bytes: int
    weight_bytes: int = 0
    unit_bytes: int = 0
    root_bytes: int = 0


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in one optimizer step, by kind of collective."""

    all_reduce_bytes: float = 0.0
    reduce_scatter_bytes: float = 0.0
    all_gather_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All kinds together."""
        return self.all_reduce_bytes + self.reduce_scatter_bytes + self.all_gather_bytes


def step_traffic(
    layout: Layout, payload: Payload, *, accumulate: int, defer_sync: bool = False
) -> StepTraffic:
    """Bytes that one rank sends per optimizer step for gradients and weights.

    accumulate   micro-batches per rank and step, A; ranks with fewer send as often
    defer_sync   zero2, zero3: gradients travel once a step
    Source       see the module

    >>> payload = Payload(gradient_bytes=800, weight_bytes=800, unit_bytes=600, root_bytes=200)
    >>> step_traffic(Layout(dp_replicate=4), payload, accumulate=3).total_bytes
    1200.0
    >>> step_traffic(Layout(dp_shard=4, zero=1), payload, accumulate=3).total_bytes
    1200.0
    >>> step_traffic(Layout(dp_shard=4, zero=2), payload, accumulate=3)
    StepTraffic(all_reduce_bytes=0.0, reduce_scatter_bytes=1800.0, all_gather_bytes=600.0)
    >>> step_traffic(Layout(dp_shard=4, zero=3), payload, accumulate=3).all_gather_bytes
    3150.0
    >>> step_traffic(Layout(dp_shard=4, zero=3), payload, accumulate=3, defer_sync=True)
    StepTraffic(all_reduce_bytes=0.0, reduce_scatter_bytes=600.0, all_gather_bytes=3150.0)
    >>> step_traffic(Layout(dp_replicate=2, dp_shard=2, zero=3), payload, accumulate=1)
    StepTraffic(all_reduce_bytes=400.0, reduce_scatter_bytes=400.0, all_gather_bytes=700.0)
    """
    ranks, replicas = layout.dp_shard, layout.dp_replicate
    inside, across = (ranks - 1) / ranks, 2 * (replicas - 1) / replicas
    sums = 1 if layout.zero < 2 or defer_sync else accumulate
    if layout.zero == 3:
        gathered_bytes = accumulate * (2 * payload.unit_bytes + payload.root_bytes)
    else:
        gathered_bytes = payload.weight_bytes if layout.zero else 0
    return StepTraffic(
        all_reduce_bytes=across * sums * payload.gradient_bytes / ranks,
        reduce_scatter_bytes=inside * sums * payload.gradient_bytes,
        all_gather_bytes=inside * gathered_bytes,
    )


def row_padded_bytes(parameters: Iterable[ParameterFacts], ranks: int) -> int:
    """Bytes of parameters as zero 3 sends them: every rank has ceil(rows / ranks) rows of each.

    >>> row_padded_bytes([ParameterFacts("w", (5, 3), "float32", 4)], 4)
    96
    """
    return sum(
        -(-p.shape[0] // ranks) * ranks * math.prod(p.shape[1:]) * p.element_bytes
        for p in parameters
    )
