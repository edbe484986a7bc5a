"""Data-parallel collectives of one step, by ZeRO stage: gradients and weights.

With A micro-batches per rank, gradients of G bytes and weights of W bytes on a rank's stage:

    ddp      all-reduce of G, once, beside the last backward pass
    zero1    reduce-scatter of G, once; all-gather of W after the update
    zero2    reduce-scatter of G per micro-batch; all-gather of W after the update
    zero3    per micro-batch and block: gather before forward, gather before backward (which
             `fsdp.reshard` may limit to the node, or omit), reduce-scatter after it; weights
             outside blocks are gathered once
    zero3 in a pipeline   the whole stage is gathered once per step and kept, its gradients are
             scattered once: stages change micro-batches too often to gather again; the gather is
             exposed
    hsdp     zero3, and an all-reduce of each rank's part over the replicas

Context-parallel ranks hold the same weights and join these groups. Fewer ranks hold an expert
(states.shard_counts); they are assumed ep · expert_tp apart, so that experts have their own group.
`defer_sync` sends gradients once per step. Without a pipeline and experts, bytes agree with
forecast/time/step_traffic.py.
On a measured machine `Calibration.efficiency` has the factors by which its `all_gather_cost` and
`reduce_scatter` are slower per byte than an all-reduce.
Source: Rajbhandari et al. 2020 (ZeRO); torch's fully_shard for the order of gathers; torchtitan for
keeping gathered weights within a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.resharding import gathers_all_blocks
from shoal.forecast.memory.model_states import ParameterElements, shard_counts
from shoal.forecast.memory.transient_memory import reshard_degree
from shoal.forecast.time.collective_time import (
    NOTHING,
    AxisGroup,
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    axis_group,
)
from shoal.forecast.time.framework_overlap import FrameworkOverlap
from shoal.planning.gradient_buckets import BUCKET_BYTES


@dataclass(frozen=True)
class DataParallelCosts:
    """Data-parallel collectives of one rank.

    Attributes:
        gradients: one reduction.
        reductions: number of them per step.
        last_share: share of a reduction that compute cannot hide.
        update: all-gather of weights once per step (zero 1 and 2; zero 3 in a pipeline).
        gather: one block's weights (zero 3), for `blocks` blocks, before their forward passes.
        again: the same before their backward passes: no cost if they were kept.
        scatter: one block's gradients, `scatters` times per step.
        root: weights outside blocks, once per micro-batch.
        suffix: placement of the groups in their nodes (see collectives.Group).
    """

    gradients: CollectiveCost = NOTHING
    reductions: int = 1
    last_share: float = 1.0
    update: CollectiveCost = NOTHING
    gather: CollectiveCost = NOTHING
    again: CollectiveCost = NOTHING
    scatter: CollectiveCost = NOTHING
    root: CollectiveCost = NOTHING
    blocks: float = 0.0
    scatters: int = 1
    suffix: str = ""

    def total(self, micro_batches: int) -> CollectiveCost:
        """Return the cost of all collectives of one step."""
        gathers = (self.gather + self.again).times(self.blocks) + self.root
        return (
            self.gradients.times(self.reductions)
            + self.update
            + gathers.times(micro_batches)
            + self.scatter.times(self.blocks * self.scatters)
        )


def gradient_bytes(case: PlanningCase, habits: FrameworkOverlap) -> int:
    """Return the bytes of a gradient element in a collective: the case's, else the framework's.

    Shoal and FSDP keep gradients of narrow computations in fp32.
    """
    if case.reduce_bytes:
        return case.reduce_bytes
    return max(case.model.element_bytes, habits.root_bytes)


@dataclass(frozen=True)
class _DataGroups:
    """Groups of the same dense weights, of the same experts, and of replicas of shards."""

    dense: AxisGroup
    experts: AxisGroup
    replicas: AxisGroup

    def collective_cost(
        self,
        collective: Callable[[AxisGroup, float], CollectiveCost],
        elements: ParameterElements,
        width: float,
    ) -> CollectiveCost:
        """Return one collective for dense elements and one for experts', of `width` bytes each."""
        dense = collective(self.dense, elements.dense * width)
        return dense + collective(self.experts, elements.experts * width)

    def gradient_sum_cost(
        self, elements: ParameterElements, width: float, scatter: float
    ) -> CollectiveCost:
        """Return a reduce-scatter over the shards, and an all-reduce of each part over replicas."""
        part = elements.dense / self.dense.ranks + elements.experts / self.experts.ranks
        return self.collective_cost(all_gather_cost, elements, width).slow_down(
            scatter
        ) + all_reduce_cost(self.replicas, part * width)


def _data_groups(case: PlanningCase) -> _DataGroups:
    layout, cluster = case.layout, case.cluster
    sharded = layout.dp_shard * (layout.dp_replicate if layout.zero == 0 else 1) * layout.cp
    apart = case.expert_degree
    return _DataGroups(
        axis_group(cluster, sharded, layout.tp),
        axis_group(cluster, max(1, sharded * layout.tp // apart), apart),
        axis_group(cluster, layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard),
    )


def data_parallel_costs(
    case: PlanningCase,
    habits: FrameworkOverlap,
    blocks: float,
    block: ParameterElements,
    outside: float,
) -> DataParallelCosts:
    """Return the collectives of a rank with `blocks` blocks and `outside` other elements.

    Args:
        block: elements of one block on this rank, after tensor and expert parallelism.
    """
    layout, groups = case.layout, _data_groups(case)
    if groups.dense.ranks == 1 and layout.dp_replicate == 1:
        return DataParallelCosts()
    if case.expert_degree == layout.tp:  # dense weights and experts share one group and message
        block = ParameterElements(sum(block), 0.0)
    narrow, wide = case.model.element_bytes, max(case.model.element_bytes, habits.root_bytes)
    element, suffix = gradient_bytes(case, habits), groups.dense.suffix
    whole = ParameterElements(blocks * block.dense + outside, blocks * block.experts)
    # Compute cannot hide the last bucket.
    last = min(1.0, BUCKET_BYTES / (sum(whole) * element)) if sum(whole) else 1.0
    if layout.serves:
        return _table_costs(case, groups.dense, sum(whole), element, wide)
    if layout.zero == 0:
        return DataParallelCosts(
            groups.collective_cost(all_reduce_cost, whole, element), 1, last, suffix=suffix
        )
    known = case.cluster.calibration.efficiency
    gather, scatter = known.get("all_gather", 1.0), known.get("reduce_scatter", 1.0)
    each_time = 1 if case.plan.defer_sync else case.accumulate
    if _gathers_all_blocks(case, blocks, block):
        outside, blocks, block = whole.dense, 0.0, ParameterElements(0.0, 0.0)
    if layout.servers:
        from shoal.forecast.time.server_costs import pull_cost, push_cost

        return DataParallelCosts(
            gradients=push_cost(case, groups.dense, sum(whole) * element),
            last_share=last,
            update=pull_cost(case, groups.dense, sum(whole) * narrow),
            suffix=suffix,
        )
    if layout.zero < 3:
        # elements outside blocks have their own width, in the same message
        sent = ParameterElements(whole.dense - outside + outside * wide / narrow, whole.experts)
        return DataParallelCosts(
            gradients=groups.collective_cost(all_gather_cost, whole, element).slow_down(scatter),
            reductions=each_time if layout.zero == 2 else 1,
            last_share=last,
            update=groups.collective_cost(all_gather_cost, sent, narrow).slow_down(gather),
            suffix=suffix,
        )
    root = all_gather_cost(groups.dense, outside * wide).slow_down(gather)
    gathered = groups.collective_cost(all_gather_cost, block, narrow).slow_down(gather)
    rest = groups.gradient_sum_cost(ParameterElements(outside, 0.0), element, scatter)
    scattered = groups.gradient_sum_cost(block, element, scatter)
    if layout.pp > 1:
        return DataParallelCosts(
            gradients=rest + scattered.times(blocks),
            last_share=last,
            update=root + gathered.times(blocks),
            suffix=suffix,
        )
    return DataParallelCosts(
        gradients=rest,
        reductions=each_time,
        gather=gathered,
        again=_backward_gather_cost(case, block, narrow, gathered, gather),
        scatter=scattered,
        root=root,
        blocks=blocks,
        scatters=each_time,
        suffix=suffix,
    )


def _gathers_all_blocks(case: PlanningCase, blocks: float, block: ParameterElements) -> bool:
    """Return whether zero 3 gathers all blocks of a rank at once (`gathers_all_blocks`)."""
    if case.framework != "shoal" or case.layout.zero < 3 or block.experts:
        return False
    return gathers_all_blocks(round(blocks), blocks * block.dense, case.plan.names_blocks)


def _table_costs(
    case: PlanningCase, group: AxisGroup, elements: float, sent: int, wide: int
) -> DataParallelCosts:
    """Return the collectives with tables on servers: rows of tables, an all-reduce of the rest."""
    from shoal.forecast.time.server_costs import count_workers, lookup_cost, table_elements

    rest_bytes = max(0.0, elements - table_elements(case)) * sent
    workers = axis_group(case.cluster, count_workers(case.layout), 1)
    return DataParallelCosts(
        gradients=all_reduce_cost(workers, rest_bytes),
        last_share=min(1.0, BUCKET_BYTES / rest_bytes) if rest_bytes else 1.0,
        update=lookup_cost(case, group, wide),
        suffix=group.suffix,
    )


def _backward_gather_cost(
    case: PlanningCase,
    block: ParameterElements,
    width: float,
    gathered: CollectiveCost,
    slower: float,
) -> CollectiveCost:
    """Return the gather of a block before its backward, from the ranks of `fsdp.reshard`."""
    layout, over = case.layout, reshard_degree(case)
    if over == 1:
        return NOTHING
    if over == shard_counts(case)[0]:
        return gathered
    near = axis_group(case.cluster, over, layout.tp * layout.cp)
    return all_gather_cost(near, sum(block) * width).slow_down(slower)
