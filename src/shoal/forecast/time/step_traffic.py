"""Bytes that a rank sends per optimizer step, by kind of collective.

    all-reduce of M bytes over n ranks    2(n−1)/n · M
    gather, reduce-scatter                (n−1)/n · M
    tp    micro-batches · Σ of its exchanges
    pp    micro-batches · (values to the next stage + gradients to the one before)

The step's own few numbers (loss, counts, norm) are not included.

Source: Shoeybi et al. 2019 (Megatron-LM), §3; Korthikanti et al. 2022 (sequence parallelism), §4;
Thakur et al. 2005 for the bytes of a collective. The tests compare it with the kernel's counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from shoal.base.plans.comm_volume import StageTransfer, TensorExchange


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in one optimizer step, by kind of collective."""

    all_reduce_bytes: float = 0.0
    reduce_scatter_bytes: float = 0.0
    all_gather_bytes: float = 0.0
    send_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Return the sum over all kinds."""
        return sum(getattr(self, kind.name) for kind in fields(self))

    def __add__(self, other: StepTraffic) -> StepTraffic:
        """Return the bytes that a rank sends on two axes together."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return StepTraffic(**both)

    def times(self, count: float) -> StepTraffic:
        """Return `count` times these bytes."""
        return StepTraffic(**{f.name: getattr(self, f.name) * count for f in fields(self)})


PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Number of times that a collective sends (n−1)/n of its payload."""


def collective_traffic(kind: str, payload_bytes: int, degree: int) -> StepTraffic:
    """Return the bytes that one rank sends for one collective over `degree` ranks.

    >>> collective_traffic("all_reduce", 1000, 4).all_reduce_bytes
    1500.0
    """
    sent = PASSES[kind] * (degree - 1) / degree * payload_bytes
    return StepTraffic(**{f"{kind}_bytes": sent})


def tensor_traffic(
    exchanges: Iterable[TensorExchange],
    degree: int,
    *,
    micro_batches: int,
    recomputed: bool = False,
) -> StepTraffic:
    """Return the bytes that one of `degree` tensor-parallel ranks sends per optimizer step.

    Args:
        micro_batches: per step on this rank.
        recomputed: forward passes run twice (full recompute).

    References:
        At the head of the module.

    >>> block = [TensorExchange("all_reduce", "forward", 1000, 2)]
    >>> block += [TensorExchange("all_reduce", "backward", 1000, 2)]
    >>> tensor_traffic(block, 2, micro_batches=3).total_bytes
    12000.0
    >>> gather = TensorExchange("all_gather", "forward", 1000)
    >>> tensor_traffic([gather], 4, micro_batches=1).all_gather_bytes
    750.0
    """
    hops = (degree - 1) / degree
    sent: dict[str, float] = {}
    for one in exchanges:
        times = micro_batches * one.count * (2 if recomputed and one.when == "forward" else 1)
        wire_bytes = PASSES[one.kind] * hops * one.payload_bytes
        sent[one.kind] = sent.get(one.kind, 0.0) + times * wire_bytes
    return StepTraffic(**{f"{kind}_bytes": size for kind, size in sent.items()})


def pipe_traffic(
    crossings: Sequence[StageTransfer], stage_rank: Sequence[int], rank: int, *, micro_batches: int
) -> StepTraffic:
    """Return the bytes that pipeline rank `rank` sends to its neighbours per optimizer step.

    Args:
        crossings: between stage 0 and 1, 1 and 2, …; stages on the same rank exchange no message.
        stage_rank: rank that holds stage 0, 1, …, as in base.actions.Schedule.

    >>> ends = [StageTransfer(100, 90)] * 3
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
