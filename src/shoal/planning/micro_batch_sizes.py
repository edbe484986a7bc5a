"""List the micro-batches that a layout can run, and choose one where the user leaves it open.

The whole share of a data-parallel rank: every further pass costs what a pass costs apart from its
samples (kernel starts, gathers of fsdp, messages of tp). In a pipeline a few passes for each stage,
since fewer leave its ranks idle. `search.fastest_micro_batch` looks at model and machine as well.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.layouts.layout import Layout
from shoal.base.plans.batches import divisors
from shoal.base.plans.plan import Plan

PASSES_PER_STAGE = 2
"""Micro-batches per rank of a pipeline: the demo's step of 16 samples on 2 ranks took 790 ms with 4
passes, 846 with 8 and 875 with 2."""


def micro_batch_sizes(layout: Layout, batch: int, at_most: int = 0) -> list[int]:
    """List the micro-batches that a layout can run, the largest first.

    Args:
        layout: whose data-parallel ranks (under dp their replicas) and schedule count.
        batch: samples per optimizer step, which the data-parallel ranks divide.
        at_most: samples that it may not exceed; 0: no bound.

    >>> micro_batch_sizes(Layout(dp_replicate=2), 24, at_most=8)
    [6, 4, 3, 2, 1]
    """
    share = batch // layout.data_degree
    each = share // layout.threads if share % layout.threads == 0 else share
    sizes = [size for size in divisors(share)[::-1] if size <= min(each, at_most or each)]
    if layout.pp == 1:
        return sizes
    from shoal.planning.pipeline_schedules import runs

    return [size for size in sizes if runs(layout, share // size)]


def usual_micro_batch(layout: Layout, batch: int, at_most: int = 0) -> int:
    """Return the micro-batch of a layout where nothing is known of model and machine.

    Args:
        layout, batch, at_most: as of `micro_batch_sizes`.

    Returns:
        The share of a data-parallel rank, in a pipeline what gives each rank two passes; 0 where
        the pipeline's schedule can run no size.

    >>> layouts = Layout(dp_replicate=2), Layout(pp=2, schedule="1f1b")
    >>> [usual_micro_batch(layout, 16) for layout in layouts]
    [8, 4]
    """
    sizes = micro_batch_sizes(layout, batch, at_most)
    share, least = batch // layout.data_degree, PASSES_PER_STAGE * layout.pp
    enough = [size for size in sizes if layout.pp == 1 or share // size >= least]
    return next(iter(enough), min(sizes, default=0))


def with_micro_batch(plan: Plan, size: int) -> Plan:
    """Return the plan with another micro-batch, and the passes that follow from it."""
    passes = plan.batch // (size * plan.layout.data_degree)
    return replace(plan, micro_batch=size, accumulate=passes)
