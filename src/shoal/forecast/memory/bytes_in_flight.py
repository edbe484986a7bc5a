"""Bytes of gradients and weights on their way between data ranks, at each moment of Shoal's step.

    ddp, zero1   all of a step's buckets are on their way until its end: what is received beside
                 what is kept, and copies where `reduce_bytes` is narrower than what is kept
    zero2        a bucket is collected beside the parts that are kept, then sent; before that the
                 one on its way is received, which may be an earlier micro-batch's
    dualpipe     without data ranks gradients lie apart: a bucket is filled from them, and summed
    zero1, 2     after the update every rank's part of the weights travels to all others
    zero3        the next block is gathered ahead; gradients that were sent stay until the next are;
                 on gloo a block's gather has a copy inside gloo, flat bytes and parameters, and
                 the memory of what was gathered, sent and received is kept for the next block

gloo (CPU) receives from every rank before it adds up: as much as was sent. NCCL receives the sum of
the rank's own part. Source: shoal.parallel.data_parallel.buckets, zero;
shoal.fabric.collectives.uneven_collectives; torch: ProcessGroupGloo.cpp (_allgather_base),
_fsdp_param_group.py (post_backward, reduce_scatter_state).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from shoal.base.estimates.estimate import Case
from shoal.base.layouts.schedule_names import canonical, copies, takes_turns
from shoal.forecast.memory.activations import kept_by_unit
from shoal.forecast.memory.framework_memory import Framework
from shoal.forecast.memory.model_states import WIDTHS, Elements, shard_counts
from shoal.forecast.memory.offloaded_bytes import streams_parameters
from shoal.forecast.memory.transient_memory import (
    Sharded,
    gathered_apart,
    gathered_elements,
    head_elements,
    kept_over,
    rank_sum,
)
from shoal.planning.gradient_buckets import BUCKET_BYTES
from shoal.planning.pipeline_stages import Stage, is_bare, is_block

BUCKETS_IN_FLIGHT = 1
"""Buckets that zero2 has on their way while it fills one (`data_parallel.zero.IN_FLIGHT`)."""


GLOO_THREADS = 2
"""Collectives of a group that gloo works at at a time (torch: ProcessGroupGloo.Options.threads)."""


class OnWay(NamedTuple):
    """Bytes at one moment each.

    Attributes:
        before: at the loss, of earlier micro-batches.
        first: in the backward of the last block.
        last: in the backward of the first block.
        sent: when the last bucket has left and no activation is there any more.
        published: while stepped weights travel.
    """

    before: float = 0.0
    first: float = 0.0
    last: float = 0.0
    sent: float = 0.0
    published: float = 0.0


class Moment(NamedTuple):
    """Bytes of zero 3 on gloo while blocks are in their backward: weights gathered, gradients sent.

    Attributes:
        through: blocks whose backward is over.
        works: whether a block's backward runs meanwhile.
    """

    gathered: float
    sent: float = 0.0
    through: int = 0
    works: bool = False


class Turn(NamedTuple):
    """Bytes of zero 3 on devices at a moment of a backward pass, which goes block by block.

    Attributes:
        gathered, sent: weights that are whole · gradients, and what is sent of them.
        freed: activations of this pass that are gone.
        made: share of the summed gradients.
        again: whether a block was computed again for what comes.
        works: whether a backward runs.
    """

    gathered: float
    sent: float
    freed: float
    made: float
    again: bool = False
    works: bool = True


class OnGloo(NamedTuple):
    """Zero 3 on gloo: bytes gathered at the loss, moments of blocks, bytes at the root's end."""

    loss: float
    blocks: list[Moment]
    root: float


def on_way(case: Case, elements: Elements) -> OnWay:
    """What zero 0 to 2 have on their way beside the states, for a rank of so many elements."""
    layout = case.layout
    if case.framework != "shoal" or layout.zero == 3:
        return OnWay()
    wide = max(4, WIDTHS[case.plan.compute])
    total = wide * sum(elements)
    if layout.data_degree == 1:
        both = layout.pp > 1 and copies(canonical(case.schedule)) > 1
        return OnWay(sent=min(total, BUCKET_BYTES) if both else 0.0)
    narrow = case.reduce_bytes / wide if 0 < case.reduce_bytes < wide else 0.0
    own = 1 / shard_counts(case)[0] if layout.zero else 0.0
    gloo = case.cluster.device.kind == "cpu"
    received = 1.0 if gloo else own
    # Every bucket's own part waits; gloo makes its copies of those that its threads are at.
    copied = min(total, GLOO_THREADS * BUCKET_BYTES) if gloo else 0.0
    published = WIDTHS[case.plan.compute] / wide * (own * total + copied) if layout.zero else 0.0
    if layout.zero < 2 or case.plan.defer_sync:
        each = narrow + (narrow or 1.0) * received if layout.zero else narrow
        before_last = total - (total % BUCKET_BYTES or min(total, BUCKET_BYTES))
        return OnWay(last=each * before_last, sent=each * total, published=published)
    each = (narrow or 1.0) * (1 + received)
    bucket = min(total, BUCKET_BYTES)
    before = each * _in_a_row(total, case.accumulate - 1, BUCKETS_IN_FLIGHT)
    waiting = each * bucket if total > bucket else before
    # Received when the next is full: the sum of the own part is made beside both.
    full = waiting + bucket + own * bucket if waiting else bucket
    sent = max(full, (each + own) * bucket)
    last = full if total > bucket else before + bucket
    return OnWay(before, before + bucket, last, sent, published)


def _in_a_row(total: float, passes: int, count: int) -> float:
    """Most bytes of `count` buckets sent one after another, when every pass sends `total`.

    >>> mib = 2**20
    >>> [_in_a_row(size * mib, 4, 3) / mib for size in (10, 40, 100)]
    [30.0, 65.0, 75.0]
    """
    buckets = int(-(-total // BUCKET_BYTES))
    if not buckets:
        return 0.0
    rounds, left = divmod(min(count, buckets * passes), buckets)
    return rounds * total + min(left * BUCKET_BYTES, total)


def arriving_bytes(case: Case, stage: Stage) -> float:
    """The largest layer's gradient before it is added to what is kept; of bare layers only.

    Facts do not say how large the matrices inside a block are, so those are left out.
    """
    if case.framework != "shoal" or case.layout.zero == 3:
        return 0.0
    bare = [unit for unit, _ in stage.units if is_bare(unit) and is_block(unit)]
    sizes = [unit.parameters - unit.plain_parameters for unit in bare]
    return WIDTHS[case.plan.compute] * max(sizes, default=0) / case.layout.tp


def goes_in_turn(case: Case) -> bool:
    """Whether `sharded_in_turn` says what zero 3 holds: where a pass goes through all of a rank."""
    if case.layout.zero < 3 or streams_parameters(case):
        return False
    if case.layout.pp == 1:
        return True
    return case.framework == "shoal" and takes_turns(canonical(case.schedule), case.chunks)


def sharded_in_turn(case: Case, habits: Framework, stage: Stage, sharded: Sharded) -> list[Turn]:
    """What zero 3 on devices has gathered, made and sent while blocks take turns.

    A block is gathered flat, then copied into its parameters: before that two are there, after it
    the next in its flat bytes. Its activations go while its gradients are made; these are copied
    together to be sent, and what was sent stays until those of the next block are copied; under
    hsdp what replicas have summed stays until the pass is over.
    """
    width, reduced = WIDTHS[case.plan.compute], max(4, case.reduce_bytes)
    sizes, root = gathered_elements(case, stage)
    if not sizes:
        return [Turn(sharded.stays, sharded.head, 0.0, 0.0, again=True)]
    freed = _freed_by_block(case, habits, stage)
    whole = kept_over(case) == 1
    turns = []
    if whole:  # In the forward pass torch lets a block's flat bytes go after the next's copy.
        flat = width * sum(sizes[-2:])
        turns.append(Turn(sharded.stays + flat, 0.0, freed[-1], 0.0, works=False))
    sums = reduced / shard_counts(case)[0] if _sums_stay(case) else 0.0
    sent = gone = summed = 0.0
    for k in reversed(range(len(sizes))):
        size, ahead = sizes[k], sizes[k - 1] if k else 0.0
        made, held = summed / (sum(sizes) + root), sharded.stays
        kept = sharded.head + sums * summed
        if whole:  # nothing is gathered again
            held -= width * sum(sizes[k + 1 :])
            before, during, after = held, held, held - width * size
        else:
            before, during = held + width * (size + max(size, ahead)), held + width * (size + ahead)
            after = held + width * ahead
        sends = (width + reduced) * size
        turns += [
            Turn(before, kept + sent, gone, made, again=True),
            Turn(during, kept + sent + width * size, gone + freed[k], made),
            Turn(after, kept + sends, gone + freed[k], made, works=False),
        ]
        sent, gone, summed = reduced * size, gone + freed[k], summed + size
    # The root's gradients are copied and sent when no activation of the pass is there any more.
    held, gone = (sharded.stays, gone) if case.layout.pp > 1 else (0.0, inf)
    turns.append(Turn(held, sharded.root + sums * summed, gone, 1.0, works=False))
    return turns


def _sums_stay(case: Case) -> bool:
    """Whether hsdp keeps sums of parts beside the gradients that they were added or copied to."""
    added = case.accumulate > 1 and not case.plan.defer_sync
    return case.layout.dp_replicate > 1 and (added or case.plan.parks_parameters)


def _freed_by_block(case: Case, habits: Framework, stage: Stage) -> list[float]:
    """Bytes of activations that each block's backward lets go, in the order of `gathered_elements`.

    None where they wait on the host.
    """
    apart = gathered_apart(case, stage)
    if case.plan.offload == "activations":
        return [0.0] * len(apart)
    kept = [one for _, one in kept_by_unit(case, habits, stage)]
    return [sum(kept[place] * count for place, count in group) for group in apart]


def gathers_on_gloo(case: Case) -> bool:
    """Whether `sharded_on_gloo` says what zero 3 holds; in a pipeline all stays gathered."""
    on_cpu = case.framework == "shoal" and case.cluster.device.kind == "cpu"
    return on_cpu and case.layout.zero == 3 and case.layout.pp == 1


def sharded_on_gloo(case: Case, stage: Stage) -> OnGloo:
    """What zero 3 on gloo has gathered and sent.

    The root (embedding, head, bare layers) stays gathered, as it is kept; the gradient of the
    head's weight waits until the root is sent. Of unequal blocks, the largest and the one before it
    count.
    """
    width = WIDTHS[case.plan.compute]
    wide = max(4, width)
    reduced = case.reduce_bytes or wide
    own = 1 / shard_counts(case)[0]
    sizes, root = gathered_elements(case, stage)
    held, head = wide * root, wide * head_elements(case, stage)
    moments, over = [], kept_over(case)
    if sizes and over == 1:
        return _kept_on_gloo(case, root, head, sizes)
    if over < shard_counts(case)[0]:
        held += width * sum(sizes) / over
    if sizes:
        block, ahead = max(zip(sizes, [0.0, *sizes[:-1]], strict=True), key=sum)
        # flat bytes, gloo's copy of them or parameters: of the block, then of the one ahead
        moments = [
            Moment(held + width * (block + max(block, 2 * ahead)), head),
            Moment(held + width * (block + ahead), head, works=True),
            Moment(held + width * ahead, head + reduced * block * (2 + own), through=1),
        ]
    # Sums of earlier micro-batches are among the gradients; the first's own are not yet.
    summed, first_sum = (own, 0.0) if case.accumulate > 1 else (0.0, own)
    if len(sizes) > 2:  # the next two are gathered while what the first sent is still held
        moments.append(
            Moment(held + width * 3 * block, head + reduced * block * (1 + first_sum), through=1)
        )
        # Blocks of one size take turns with the memory of what is gathered, sent and received: it
        # lies beside a block's parameters and gradients from the third one's backward on.
        moments += [
            Moment(
                held + width * 2 * block,
                head + wide * block + reduced * block * (2 + first_sum * sent),
                through=sent + 1,
            )
            for sent in sorted({2, len(sizes) - 1})
        ]
    if often := _called_often(case, stage):
        # Its gradient waits in the graph for all its calls, each of which sends what it has; two
        # gathers' memory is kept meanwhile.
        moments.append(
            Moment(
                held + width * 3 * often,
                head + (wide + reduced * (2 + own)) * often,
                works=True,
            )
        )
    return OnGloo(held, moments, reduced * root * (2 + summed))


def _kept_on_gloo(case: Case, root: float, head: float, sizes: list[float]) -> OnGloo:
    """The same where blocks stay gathered until their backward pass has sent what it made.

    Args:
        root, sizes: elements, of the rest and of each block.
        head: bytes of its gradient.
    """
    width = WIDTHS[case.plan.compute]
    wide = max(4, width)
    reduced, own = case.reduce_bytes or wide, 1 / shard_counts(case)[0]
    kept, block = wide * root + width * sum(sizes), max(sizes)
    moments = [
        # In the forward pass, flat bytes beside the parameters, and those of the block before.
        Moment(kept + width * block * min(2, len(sizes)), head),
        Moment(kept, head, works=True),
        Moment(kept - width * block, head + reduced * block * (2 + own), through=1),
    ]
    return OnGloo(kept, moments, reduced * root * (2 + (own if case.accumulate > 1 else 0.0)))


def _called_often(case: Case, stage: Stage) -> float:
    """Elements of the largest block that a forward pass calls more than once."""
    again = {unit.name for unit, _ in stage.units if unit.tied_to == unit.name}
    sizes = [sum(rank_sum(case, [(unit, 1.0)])) for unit, _ in stage.units if unit.name in again]
    return max(sizes, default=0.0)
