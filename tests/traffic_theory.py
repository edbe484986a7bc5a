"""Bytes that a rank sends for gradients and weights, by the papers' formulas: what tests hold on to.

With n ranks over which something is split, r replicas of that, A micro-batches per rank and step,
G bytes of gradients and W of weights:

    ddp             2(n−1)/n · G                             one all-reduce
    zero1           (n−1)/n · (G + W)                        reduce-scatter, then all-gather
    zero2           (n−1)/n · (A·G + W)                      a reduce-scatter per micro-batch
    fsdp            A · (n−1)/n · (2·units + root + G)       units gathered twice per micro-batch
    hsdp            fsdp, and A · 2(r−1)/r · G/n             parts all-reduced over replicas

With `defer_sync` gradients travel once. Of padding nothing is said here.

Source: Rajbhandari et al. 2020 (ZeRO), §7; Thakur et al. 2005 for what a collective sends
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.layouts.layout import Layout
from shoal.forecast.time.step_traffic import StepTraffic


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


def step_traffic(
    layout: Layout, payload: Payload, *, accumulate: int, defer_sync: bool = False
) -> StepTraffic:
    """Bytes that one rank sends per optimizer step for gradients and weights.

    accumulate   micro-batches per rank and step, A; ranks with fewer send as often
    defer_sync   zero2, zero3: gradients travel once a step
    Source       see the module

    """
    ranks, replicas = layout.dp_shard, layout.dp_replicate
    inside, across = (ranks - 1) / ranks, 2 * (replicas - 1) / replicas
    once = layout.zero < 2 or defer_sync
    sums = 1 if once else accumulate
    if layout.zero == 3:
        gathered_bytes = accumulate * (2 * payload.unit_bytes + payload.root_bytes)
    else:
        gathered_bytes = payload.weight_bytes if layout.zero else 0
    return StepTraffic(
        all_reduce_bytes=across * sums * payload.gradient_bytes / ranks,
        reduce_scatter_bytes=inside * sums * payload.gradient_bytes,
        all_gather_bytes=inside * gathered_bytes,
    )
