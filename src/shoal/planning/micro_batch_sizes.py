"""Micro-batch sizes that a layout can run, and the default size.

The default is a data-parallel rank's whole share of the batch: every further pass has a fixed cost
(kernel starts, gathers of fsdp, messages of tp). In a pipeline the default is a few passes per
stage, since fewer leave its ranks idle. `search.fastest_micro_batch` also uses model and machine.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.layouts.layout import Layout
from shoal.base.plans.batches import divisors
from shoal.base.plans.plan import Plan

PASSES_PER_STAGE = 2
"""Micro-batches per rank of a pipeline. The demo's step of 16 samples on 2 ranks took 790 ms with
4 passes, 846 with 8 and 875 with 2."""


def micro_batch_sizes(layout: Layout, batch: int, at_most: int = 0) -> list[int]:
    """List the micro-batch sizes that a layout can run, the largest first.

    Args:
        layout: gives the data-parallel ranks (under dp the replicas) and the schedule.
        batch: samples per optimizer step, a multiple of the data-parallel ranks.
        at_most: largest size in samples; 0: no bound.

    >>> micro_batch_sizes(Layout(dp_replicate=2), 24, at_most=8)
    [6, 4, 3, 2, 1]
    """
    share = batch // layout.data_degree
    each = share // layout.threads if share % layout.threads == 0 else share
    sizes = [size for size in divisors(share)[::-1] if size <= min(each, at_most or each)]
    if layout.pp == 1:
        return sizes
    from shoal.planning.pipeline_schedules import can_run

    return [size for size in sizes if can_run(layout, share // size)]


def default_micro_batch(layout: Layout, batch: int, at_most: int = 0) -> int:
    """Return the default micro-batch of a layout, without facts of the model or the machine.

    Args:
        layout, batch, at_most: as in `micro_batch_sizes`.

    Returns:
        The share of a data-parallel rank; in a pipeline the size that gives each rank two passes.
        0 if the pipeline's schedule can run no size.

    >>> layouts = Layout(dp_replicate=2), Layout(pp=2, schedule="1f1b")
    >>> [default_micro_batch(layout, 16) for layout in layouts]
    [8, 4]
    """
    sizes = micro_batch_sizes(layout, batch, at_most)
    share, least = batch // layout.data_degree, PASSES_PER_STAGE * layout.pp
    enough = [size for size in sizes if layout.pp == 1 or share // size >= least]
    return next(iter(enough), min(sizes, default=0))


def with_micro_batch(plan: Plan, size: int) -> Plan:
    """Return the plan with another micro-batch size and the accumulation that follows from it."""
    passes = plan.batch // (size * plan.layout.data_degree)
    return replace(plan, micro_batch=size, accumulate=passes)
