"""How many bytes a rank sends per optimizer step, by the arithmetic of each axis of a layout.

With n ranks over which something is split, r replicas of that, A micro-batches per rank and step,
G bytes of gradients and W of weights:

    ddp             2(n−1)/n · G                             one all-reduce
    zero1           (n−1)/n · (G + W)                        reduce-scatter, then all-gather
    zero2           (n−1)/n · (A·G + W)                      a reduce-scatter per micro-batch
    fsdp            A · (n−1)/n · (2·units + root + G)       units gathered twice per micro-batch
    hsdp            fsdp, and A · 2(r−1)/r · G/n             parts all-reduced over replicas
    tp              A · Σ of its exchanges + 2(t−1)/t · P    an all-reduce of M sends 2(t−1)/t · M,
                                                             a gather or a scatter half of that
    pp              A · (values to the next stage + gradients to the one before)

t tensor-parallel ranks; P bytes of gradients of parameters that are whole on all of them, summed
once a step. With tp and pp, G and W are those of the rank's own part.

With `defer_sync` gradients travel once: zero2 sends what zero1 does (in a pipeline it always does),
fsdp and hsdp have A = 1 in the terms with G. Of the step's own few numbers (loss, counts, norm) and
of padding nothing is said here: give `gradient_bytes` and the others with their padding if it
matters.

Source: Rajbhandari et al. 2020 (ZeRO), §7; Shoeybi et al. 2019 (Megatron-LM), §3; Korthikanti et
al. 2022 (sequence parallelism), §4; Thakur et al. 2005 for what a collective sends. The tests hold
it against the kernel's counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from shoal.base.comm_volume import Crossing, TensorExchange
from shoal.base.layout import Layout
from shoal.base.placement import Placement


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
    send_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All kinds together."""
        return sum(getattr(self, kind.name) for kind in fields(self))

    def __add__(self, other: StepTraffic) -> StepTraffic:
        """What a rank sends on two axes together."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return StepTraffic(**both)

    def times(self, count: float) -> StepTraffic:
        """As often as that."""
        return StepTraffic(**{f.name: getattr(self, f.name) * count for f in fields(self)})


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
    >>> zero2 = step_traffic(Layout(dp_shard=4, zero=2), payload, accumulate=3)
    >>> zero2.reduce_scatter_bytes, zero2.all_gather_bytes
    (1800.0, 600.0)
    >>> step_traffic(Layout(dp_shard=4, zero=3), payload, accumulate=3).all_gather_bytes
    3150.0
    >>> deferred = step_traffic(Layout(dp_shard=4, zero=3), payload, accumulate=3, defer_sync=True)
    >>> deferred.reduce_scatter_bytes, deferred.all_gather_bytes
    (600.0, 3150.0)
    >>> hsdp = step_traffic(Layout(dp_replicate=2, dp_shard=2, zero=3), payload, accumulate=1)
    >>> hsdp.all_reduce_bytes, hsdp.reduce_scatter_bytes, hsdp.all_gather_bytes
    (400.0, 400.0, 700.0)
    """
    ranks, replicas = layout.dp_shard, layout.dp_replicate
    inside, across = (ranks - 1) / ranks, 2 * (replicas - 1) / replicas
    once = layout.zero < 2 or defer_sync or (layout.zero == 2 and layout.pp > 1)
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


def tensor_traffic(
    exchanges: Iterable[TensorExchange],
    degree: int,
    *,
    micro_batches: int,
    partial_bytes: int = 0,
    recomputed: bool = False,
) -> StepTraffic:
    """Bytes that one rank sends per optimizer step over `degree` tensor-parallel ranks.

    micro_batches  per step on this rank · recomputed  forward passes run twice (full recompute)
    partial_bytes  gradients of whole parameters, summed over the ranks once a step
    Source         see the module

    >>> block = [TensorExchange("all_reduce", "forward", 1000, 2)]
    >>> block += [TensorExchange("all_reduce", "backward", 1000, 2)]
    >>> tensor_traffic(block, 2, micro_batches=3, partial_bytes=60).total_bytes
    12060.0
    >>> gather = TensorExchange("all_gather", "forward", 1000)
    >>> tensor_traffic([gather], 4, micro_batches=1).all_gather_bytes
    750.0
    """
    hops = (degree - 1) / degree
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    sent = {"all_reduce": passes["all_reduce"] * hops * partial_bytes}
    for one in exchanges:
        times = micro_batches * one.count * (2 if recomputed and one.when == "forward" else 1)
        wire_bytes = passes[one.kind] * hops * one.payload_bytes
        sent[one.kind] = sent.get(one.kind, 0.0) + times * wire_bytes
    return StepTraffic(**{f"{kind}_bytes": size for kind, size in sent.items()})


def pipe_traffic(
    crossings: Sequence[Crossing], stage_rank: Sequence[int], rank: int, *, micro_batches: int
) -> StepTraffic:
    """Bytes that rank `rank` of a pipeline sends per optimizer step to its neighbours.

    crossings   between stage 0 and 1, 1 and 2, …; stages on one rank hand over without a message
    stage_rank  rank that holds stage 0, 1, …, as in base.actions.Schedule

    >>> ends = [Crossing(100, 90)] * 3
    >>> [pipe_traffic(ends, (0, 1, 2, 3), r, micro_batches=2).send_bytes for r in range(4)]
    [200, 380, 380, 180]
    >>> [pipe_traffic(ends, (0, 1, 1, 0), r, micro_batches=1).send_bytes for r in range(2)]
    [190, 190]
    """
    sent_bytes = 0
    for stage, crossing in enumerate(crossings):
        before, after = stage_rank[stage], stage_rank[stage + 1]
        if before == after:
            continue
        sent_bytes += crossing.forward_bytes * (before == rank)
        sent_bytes += crossing.backward_bytes * (after == rank)
    return StepTraffic(send_bytes=sent_bytes * micro_batches)


def row_padded_bytes(parameters: Iterable[Placement], ranks: int) -> int:
    """Bytes of parameters as zero 3 sends them: every rank has ceil(rows / ranks) rows of each.

    >>> row_padded_bytes([Placement("w", (5, 3), "float32")], 4)
    96
    """
    return sum(
        -(-p.shape[0] // ranks) * ranks * math.prod(p.shape[1:]) * p.element_bytes
        for p in parameters
    )
