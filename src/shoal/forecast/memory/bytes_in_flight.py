"""Bytes of gradients and weights in flight between data-parallel ranks, by moment of a step.

    ddp, zero1   all of a step's buckets are in flight until its end: receive buffers beside the
                 kept gradients, and copies if `reduce_bytes` is narrower than the kept gradients
    zero2        a bucket is filled beside the kept parts, then sent; before that the bucket in
                 flight is received, which may be an earlier micro-batch's
    gloo         under zero1 two buckets are in flight. Their buffers, and zero2's, stay from step
                 to step
    dualpipe     without data ranks gradients are separate tensors: a bucket is filled, and summed
    zero1, 2     after the update every rank's part of the weights is gathered by all others
    zero3        the next block is gathered ahead; sent gradients stay until the next are sent; on
                 gloo a block's gather has a copy inside gloo, flat bytes and parameters, and the
                 next block reuses the memory of gathers, sends and receives

gloo (CPU) receives from every rank before it adds up: as many bytes as were sent. NCCL receives the
sum of the rank's own part. Source: shoal.parallel.data_parallel.buckets, zero;
shoal.fabric.collectives.uneven_collectives; torch: ProcessGroupGloo.cpp (_allgather_base),
_fsdp_param_group.py (post_backward, reduce_scatter_state).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.schedule_names import canonical_schedule, model_copies, runs_single_stage
from shoal.forecast.memory.activations import saved_by_unit
from shoal.forecast.memory.framework_memory import FrameworkMemory
from shoal.forecast.memory.model_states import WIDTHS, ParameterElements, shard_counts
from shoal.forecast.memory.offloaded_bytes import streams_parameters
from shoal.forecast.memory.transient_memory import (
    ShardedBytes,
    gather_groups,
    gathered_elements,
    head_elements,
    reshard_degree,
    sum_rank_elements,
)
from shoal.planning.gradient_buckets import BUCKET_BYTES
from shoal.planning.pipeline_stages import StageUnits, is_block, is_layer_unit

BUCKETS_IN_FLIGHT = 1
"""Buckets that zero2 sends while it fills one (`data_parallel.zero.IN_FLIGHT`)."""


GLOO_THREADS = 2
"""Concurrent collectives of a gloo group (torch: ProcessGroupGloo.Options.threads), and so buckets
in flight on a CPU under zero1 and after the update (`data_parallel.zero.TRANSFERS`)."""


class BytesInFlight(NamedTuple):
    """Bytes in flight at five moments of a step.

    Attributes:
        before: at the loss, of earlier micro-batches.
        first: in the backward of the last block.
        last: in the backward of the first block.
        sent: when the last bucket is sent and all activations are freed.
        published: during the all-gather of updated weights.
        kept: part of all five, which stays from step to step.
    """

    before: float = 0.0
    first: float = 0.0
    last: float = 0.0
    sent: float = 0.0
    published: float = 0.0
    kept: float = 0.0


class GlooMoment(NamedTuple):
    """Bytes of zero 3 on gloo at a moment of a backward: gathered weights, gradients in flight.

    Attributes:
        through: blocks whose backward is over.
        works: whether a block's backward runs at this moment.
    """

    gathered: float
    sent: float = 0.0
    through: int = 0
    works: bool = False


class BackwardMoment(NamedTuple):
    """Bytes of zero 3 on devices at a moment of a backward pass, which goes block by block.

    Attributes:
        gathered, sent: whole weights; gradients, and their buffers in flight.
        freed: freed activations of this pass.
        made: share of the summed gradients.
        again: whether a block was recomputed for the next backward.
        works: whether a backward runs.
    """

    gathered: float
    sent: float
    freed: float
    made: float
    again: bool = False
    works: bool = True


class GlooBytes(NamedTuple):
    """Bytes of zero 3 on gloo: gathered at the loss, by moments of blocks, at the root's end."""

    loss: float
    blocks: list[GlooMoment]
    root: float


def bytes_in_flight(case: PlanningCase, elements: ParameterElements) -> BytesInFlight:
    """Return the bytes in flight of zero 0 to 2 beside the states, for a rank's elements."""
    layout = case.layout
    if case.framework != "shoal" or layout.zero == 3:
        return BytesInFlight()
    wide = max(4, WIDTHS[case.plan.compute])
    total = wide * sum(elements)
    if layout.data_degree == 1:
        both = layout.pp > 1 and model_copies(canonical_schedule(case.schedule)) > 1
        return BytesInFlight(sent=min(total, BUCKET_BYTES) if both else 0.0)
    narrow = case.reduce_bytes / wide if 0 < case.reduce_bytes < wide else 0.0
    own = 1 / shard_counts(case)[0] if layout.zero else 0.0
    gloo = case.cluster.device.kind == "cpu"
    if layout.zero and gloo and not layout.serves:
        return _bytes_on_gloo(case, total, narrow, own)
    received = 1.0 if gloo else own
    # Every bucket's own part waits; gloo copies the buckets that its threads process.
    copied = min(total, GLOO_THREADS * BUCKET_BYTES) if gloo else 0.0
    published = WIDTHS[case.plan.compute] / wide * (own * total + copied) if layout.zero else 0.0
    if layout.zero < 2 or case.plan.defer_sync:
        each = narrow + (narrow or 1.0) * received if layout.zero else narrow
        before_last = total - (total % BUCKET_BYTES or min(total, BUCKET_BYTES))
        return BytesInFlight(last=each * before_last, sent=each * total, published=published)
    each = (narrow or 1.0) * (1 + own)
    bucket = min(total, BUCKET_BYTES)
    before = each * _most_consecutive_bytes(total, case.accumulate - 1, BUCKETS_IN_FLIGHT)
    waiting = each * bucket if total > bucket else before
    # Received when the next bucket is full: the own part's sum is made beside both.
    full = waiting + bucket + own * bucket if waiting else bucket
    sent = max(full, (each + own) * bucket)
    last = full if total > bucket else before + bucket
    return BytesInFlight(before, before + bucket, last, sent, published)


def _bytes_on_gloo(case: PlanningCase, total: float, narrow: float, own: float) -> BytesInFlight:
    """Return the bytes in flight of zero 1 and 2 on a CPU, where the buffers of transfers stay.

    Args:
        case: the run.
        total: bytes of the rank's gradients, before they are split.
        narrow: width of what is sent ÷ that of gradients; 0.0: they are the same.
        own: this rank's share.
    """
    bucket, two = min(total, BUCKET_BYTES), min(total, GLOO_THREADS * BUCKET_BYTES)
    width = WIDTHS[case.plan.compute] / max(4, WIDTHS[case.plan.compute])
    # New weights are sent from there, too: on one machine to each rank from its own memory. Between
    # machines gloo's all-gather copies the buckets that its threads process.
    near = case.layout.processes <= case.cluster.per_node
    received = max(narrow or 1.0, width if near else own * width)
    if case.layout.zero == 1 or case.plan.defer_sync:
        kept = (received + narrow) * two
    else:  # one is filled while another is in flight, maybe of an earlier micro-batch
        staged = two if total > bucket or case.accumulate == 1 else 2 * bucket
        kept = staged + (received + narrow + own) * bucket
    copied = 0.0 if near else width * two
    return BytesInFlight(kept, kept, kept, kept, kept + copied, kept)


def _most_consecutive_bytes(total: float, passes: int, count: int) -> float:
    """Return the most bytes of `count` consecutive buckets, if every pass sends `total`.

    >>> mib = 2**20
    >>> [_most_consecutive_bytes(size * mib, 4, 3) / mib for size in (10, 40, 100)]
    [30.0, 65.0, 75.0]
    """
    buckets = int(-(-total // BUCKET_BYTES))
    if not buckets:
        return 0.0
    rounds, left = divmod(min(count, buckets * passes), buckets)
    return rounds * total + min(left * BUCKET_BYTES, total)


def incoming_gradient_bytes(case: PlanningCase, stage: StageUnits) -> float:
    """Return the largest layer's gradient before it is added to the kept one, of bare layers.

    The model's facts do not contain the sizes of matrices inside a block, so blocks are omitted.
    """
    if case.framework != "shoal" or case.layout.zero == 3:
        return 0.0
    bare = [unit for unit, _ in stage.units if is_layer_unit(unit) and is_block(unit)]
    sizes = [unit.parameters - unit.plain_parameters for unit in bare]
    return WIDTHS[case.plan.compute] * max(sizes, default=0) / case.layout.tp


def is_blockwise(case: PlanningCase) -> bool:
    """Return whether `blockwise_moments` applies to zero 3: a pass goes through all of a rank."""
    if case.layout.zero < 3 or streams_parameters(case):
        return False
    if case.layout.pp == 1:
        return True
    return case.framework == "shoal" and runs_single_stage(
        canonical_schedule(case.schedule), case.chunks
    )


def blockwise_moments(
    case: PlanningCase, habits: FrameworkMemory, stage: StageUnits, sharded: ShardedBytes
) -> list[BackwardMoment]:
    """Return zero 3's bytes on devices, gathered and in flight, at moments of a backward.

    A block is gathered flat, then copied into its parameters. Before the copy two flat blocks
    exist; after it the next block exists flat. The block's activations are freed while its
    gradients are made. These are copied together for the reduce-scatter, and the sent copy stays
    until the next block's gradients are copied. Under hsdp the sums over replicas stay until the
    pass is over.
    """
    width, reduced = WIDTHS[case.plan.compute], max(4, case.reduce_bytes)
    sizes, root = gathered_elements(case, stage)
    if not sizes:
        return [BackwardMoment(sharded.stays, sharded.head, 0.0, 0.0, again=True)]
    freed = _freed_by_block(case, habits, stage)
    whole = reshard_degree(case) == 1
    turns = []
    if whole:  # In the forward pass torch frees a block's flat bytes after the next block's copy.
        flat = width * sum(sizes[-2:])
        turns.append(BackwardMoment(sharded.stays + flat, 0.0, freed[-1], 0.0, works=False))
    sums = reduced / shard_counts(case)[0] if _keeps_replica_sums(case) else 0.0
    sent = gone = summed = 0.0
    for k in reversed(range(len(sizes))):
        size, ahead = sizes[k], sizes[k - 1] if k else 0.0
        made, held = summed / (sum(sizes) + root), sharded.stays
        kept = sharded.head + sums * summed
        if whole:  # no second gather
            held -= width * sum(sizes[k + 1 :])
            before, during, after = held, held, held - width * size
        else:
            before, during = held + width * (size + max(size, ahead)), held + width * (size + ahead)
            after = held + width * ahead
        sends = (width + reduced) * size
        turns += [
            BackwardMoment(before, kept + sent, gone, made, again=True),
            BackwardMoment(during, kept + sent + width * size, gone + freed[k], made),
            BackwardMoment(after, kept + sends, gone + freed[k], made, works=False),
        ]
        sent, gone, summed = reduced * size, gone + freed[k], summed + size
    # The root's gradients are copied and sent after all activations of the pass are freed.
    held, gone = (sharded.stays, gone) if case.layout.pp > 1 else (0.0, inf)
    turns.append(BackwardMoment(held, sharded.root + sums * summed, gone, 1.0, works=False))
    return turns


def _keeps_replica_sums(case: PlanningCase) -> bool:
    """Return whether hsdp keeps sums of parts beside the gradients that they were added to."""
    added = case.accumulate > 1 and not case.plan.defer_sync
    return case.layout.dp_replicate > 1 and (added or case.plan.offloads_parameters)


def _freed_by_block(case: PlanningCase, habits: FrameworkMemory, stage: StageUnits) -> list[float]:
    """Return the bytes of activations that each block's backward frees, by `gathered_elements`.

    All are 0 if the activations wait on the host.
    """
    apart = gather_groups(case, stage)
    if case.plan.offload == "activations":
        return [0.0] * len(apart)
    kept = [one for _, one in saved_by_unit(case, habits, stage)]
    return [sum(kept[place] * count for place, count in group) for group in apart]


def gathers_on_gloo(case: PlanningCase) -> bool:
    """Return whether `gloo_moments` applies to zero 3; in a pipeline all stays gathered."""
    on_cpu = case.framework == "shoal" and case.cluster.device.kind == "cpu"
    return on_cpu and case.layout.zero == 3 and case.layout.pp == 1


def gloo_moments(case: PlanningCase, stage: StageUnits) -> GlooBytes:
    """Return zero 3's bytes on gloo, gathered and in flight, at moments of a step.

    The root (embedding, head, bare layers) stays gathered in its own width. The gradient of the
    head's weight waits until the root is sent. Of unequal blocks, the largest and the one before it
    count.
    """
    width = WIDTHS[case.plan.compute]
    wide = max(4, width)
    reduced = case.reduce_bytes or wide
    own = 1 / shard_counts(case)[0]
    sizes, root = gathered_elements(case, stage)
    held, head = wide * root, wide * head_elements(case, stage)
    moments, over = [], reshard_degree(case)
    if sizes and over == 1:
        return _gloo_moments_without_reshard(case, root, head, sizes)
    if over < shard_counts(case)[0]:
        held += width * sum(sizes) / over
    if sizes:
        block, ahead = max(zip(sizes, [0.0, *sizes[:-1]], strict=True), key=sum)
        # flat bytes, and gloo's copy of them or parameters: of the block, then of the next one
        moments = [
            GlooMoment(held + width * (block + max(block, 2 * ahead)), head),
            GlooMoment(held + width * (block + ahead), head, works=True),
            GlooMoment(held + width * ahead, head + reduced * block * (2 + own), through=1),
        ]
    # The gradients include sums of earlier micro-batches, but not yet the first one's own sums.
    summed, first_sum = (own, 0.0) if case.accumulate > 1 else (0.0, own)
    if len(sizes) > 2:  # the next two are gathered while the first one's sent buffers exist
        moments.append(
            GlooMoment(
                held + width * 3 * block, head + reduced * block * (1 + first_sum), through=1
            )
        )
        # Blocks of equal size reuse the memory of gathers, sends and receives: from the third
        # block's backward on it lies beside a block's parameters and gradients.
        moments += [
            GlooMoment(
                held + width * 2 * block,
                head + wide * block + reduced * block * (2 + first_sum * sent),
                through=sent + 1,
            )
            for sent in sorted({2, len(sizes) - 1})
        ]
    if often := _repeated_block_elements(case, stage):
        # Its gradient waits in the graph for all its calls, each of which sends its part; the
        # memory of two gathers stays meanwhile.
        moments.append(
            GlooMoment(
                held + width * 3 * often,
                head + (wide + reduced * (2 + own)) * often,
                works=True,
            )
        )
    return GlooBytes(held, moments, reduced * root * (2 + summed))


def _gloo_moments_without_reshard(
    case: PlanningCase, root: float, head: float, sizes: list[float]
) -> GlooBytes:
    """Return zero 3's bytes on gloo if blocks stay gathered until their backward is sent.

    Args:
        root, sizes: elements of the root and of each block.
        head: bytes of the head's gradient.
    """
    width = WIDTHS[case.plan.compute]
    wide = max(4, width)
    reduced, own = case.reduce_bytes or wide, 1 / shard_counts(case)[0]
    kept, block = wide * root + width * sum(sizes), max(sizes)
    moments = [
        # In the forward pass: flat bytes beside the parameters, and those of the block before.
        GlooMoment(kept + width * block * min(2, len(sizes)), head),
        GlooMoment(kept, head, works=True),
        GlooMoment(kept - width * block, head + reduced * block * (2 + own), through=1),
    ]
    return GlooBytes(kept, moments, reduced * root * (2 + (own if case.accumulate > 1 else 0.0)))


def _repeated_block_elements(case: PlanningCase, stage: StageUnits) -> float:
    """Return the elements of the largest block that a forward pass calls more than once."""
    again = {unit.name for unit, _ in stage.units if unit.tied_to == unit.name}
    sizes = [
        sum(sum_rank_elements(case, [(unit, 1.0)])) for unit, _ in stage.units if unit.name in again
    ]
    return max(sizes, default=0.0)
