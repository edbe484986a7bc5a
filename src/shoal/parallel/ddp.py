"""Data parallel: every rank holds the whole model and gets the whole sum of the gradients."""

from __future__ import annotations

from dataclasses import replace

from shoal.parallel.buckets import BucketReducer
from shoal.parallel.program import Program, whole_locals


def apply(program: Program) -> Program:
    """Give the program a reducer that sums over all ranks in the plan's buckets."""
    reducer = BucketReducer(program.parameters, program.plan.buckets, program.world)
    return replace(
        program,
        reducer=reducer,
        local=whole_locals(program.parameters),
        copies=program.world.size,
        on_close=(*program.on_close, reducer.close),
    )
