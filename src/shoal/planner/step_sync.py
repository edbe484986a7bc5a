"""What data parallelism sends in one step, and when: gradients and weights, by ZeRO stage.

With A micro-batches per rank, gradients of G bytes and weights of W bytes on a rank's stage:

    ddp      all-reduce of G, once, beside the last backward pass
    zero1    reduce-scatter of G, once; all-gather of W after the update
    zero2    reduce-scatter of G per micro-batch; all-gather of W after the update
    zero3    per micro-batch and block: gather before forward, gather before backward,
             reduce-scatter after it; what is in no block is gathered once
    hsdp     zero3, and an all-reduce of each rank's part over the replicas

Context-parallel ranks hold the same weights and join these groups. `defer_sync` sends gradients
once per step. Bytes agree with planner/traffic.py.
A machine that was measured knows how much slower per byte than an all-reduce its `all_gather` and
`reduce_scatter` are (`Calibration.efficiency`).
Source: Rajbhandari et al. 2020 (ZeRO); torch's fully_shard for the order of gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.estimate import Case
from shoal.planner.collectives import NOTHING, Cost, all_gather, all_reduce, group_of
from shoal.planner.step_habits import Habits

BUCKET_BYTES = 25e6
"""Gradients travel in pieces of about this size; the last one cannot be hidden."""


@dataclass(frozen=True)
class Sync:
    """Data-parallel exchanges of one rank.

    gradients   of one reduction · reductions  per step · last_share  of it, what nothing can hide
    update      weights after the optimizer's step (zero 1 and 2)
    gather      one block's weights (zero 3), `blocks` of them, twice per micro-batch
    scatter     one block's gradients, `scatters` times per step
    root        weights outside blocks, once per micro-batch
    suffix      how the groups lie in their nodes (see collectives.Group)
    """

    gradients: Cost = NOTHING
    reductions: int = 1
    last_share: float = 1.0
    update: Cost = NOTHING
    gather: Cost = NOTHING
    scatter: Cost = NOTHING
    root: Cost = NOTHING
    blocks: float = 0.0
    scatters: int = 1
    suffix: str = ""

    def total(self, micro_batches: int) -> Cost:
        """All of it in one step."""
        gathers = self.gather.times(2 * self.blocks) + self.root
        return (
            self.gradients.times(self.reductions)
            + self.update
            + gathers.times(micro_batches)
            + self.scatter.times(self.blocks * self.scatters)
        )


def gradient_bytes(case: Case, habits: Habits) -> int:
    """Of one gradient element as it is sent: as the case says, else as the framework keeps it.

    Shoal and FSDP keep gradients of narrow computations in fp32.
    """
    if case.reduce_bytes:
        return case.reduce_bytes
    return max(case.model.element_bytes, habits.root_bytes)


def data_sync(
    case: Case, habits: Habits, blocks: float, block_parameters: float, outside: float
) -> Sync:
    """The exchanges of a rank whose stage has `blocks` blocks, and `outside` elements beside them.

    block_parameters   elements of one block on this rank (after tensor parallelism)
    """
    layout, cluster = case.layout, case.cluster
    sharded = layout.dp_shard * (layout.dp_replicate if layout.zero == 0 else 1)
    shard = group_of(cluster, sharded * layout.cp, layout.tp)
    if shard.ranks == 1 and layout.dp_replicate == 1:
        return Sync()
    narrow, wide = case.model.element_bytes, max(case.model.element_bytes, habits.root_bytes)
    element = gradient_bytes(case, habits)
    block_bytes, root_bytes = block_parameters * narrow, outside * wide
    whole = (blocks * block_parameters + outside) * element
    each_time = 1 if case.defer_sync else case.accumulate
    last = min(1.0, BUCKET_BYTES / whole) if whole else 1.0
    if layout.zero == 0:
        return Sync(all_reduce(shard, whole), 1, last, suffix=shard.suffix)
    known = cluster.calibration.efficiency
    gather, scatter = known.get("all_gather", 1.0), known.get("reduce_scatter", 1.0)
    if layout.zero < 3:
        return Sync(
            gradients=all_gather(shard, whole).slower(scatter),
            reductions=each_time if layout.zero == 2 else 1,
            last_share=last,
            update=all_gather(shard, blocks * block_bytes + root_bytes).slower(gather),
            suffix=shard.suffix,
        )
    replicas = group_of(cluster, layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)

    def summed(elements: float) -> Cost:
        """Scattered over the shards; each rank's part then summed over the replicas."""
        size = elements * element
        return all_gather(shard, size).slower(scatter) + all_reduce(replicas, size / shard.ranks)

    return Sync(
        gradients=summed(outside),
        reductions=each_time,
        last_share=last,
        gather=all_gather(shard, block_bytes).slower(gather),
        scatter=summed(block_parameters),
        root=all_gather(shard, root_bytes).slower(gather),
        blocks=blocks,
        scatters=each_time,
        suffix=shard.suffix,
    )
