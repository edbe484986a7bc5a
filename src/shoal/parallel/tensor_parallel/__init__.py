"""Tensor and sequence parallelism: ranks hold parts of every layer and compute it together.

The split of a layer is derived from the layer itself (`spmd/`). Its graph is traced as on one
device. Labels for the part that each rank holds are propagated by rules, which are found by running
the operations. The rewritten graph then runs instead of the layer. Under sequence parallelism ranks
hold parts of the sequence between the split layers as well, which takes no more bytes and keeps
fewer activations.

Source: Shoeybi et al. 2019 (1909.08053), Korthikanti et al. 2022 (2205.05198); the derivation is
described in docs/how-it-works/any-module.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import TensorPolicy
from shoal.base.plans.placement import Placement
from shoal.parallel.build.mmap_init import mmap_init
from shoal.parallel.program import Program
from shoal.parallel.spmd.block_check import check_blocks
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.sequence_shards import SequenceShard
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.parallel.spmd.stage_crossing import ShardKind
from shoal.parallel.tensor_parallel.cut_weights import apply_split, parameter_cut
from shoal.trace.flow.forward_record import ForwardRecord


def apply(program: Program, split: ModelSplit | None) -> Program:
    """Cut the module's parameters in place, and run its blocks as their split graphs."""
    if split is None:
        return program
    with mmap_init():  # other stages' parts are freed before they take private memory
        undo = apply_split(program.module, split, program.tensor)
    program.notices.extend(split.notices)
    return replace(program, on_close=(*program.on_close, *undo))


def place(rows: Mapping[str, Placement], split: ModelSplit) -> dict[str, Placement]:
    """Set how tp cuts each parameter, and which gradients are summed over its ranks."""
    found = dict(rows)
    for name, one in split.parameters.items():
        row = found[name]
        over = (*row.sum_over, "tp") if one.partial and row.trains else row.sum_over
        found[name] = replace(row, cut=parameter_cut(name, row.shape, split), sum_over=over)
    return found


def plan(program: Program, record: ForwardRecord) -> ModelSplit | None:
    """Plan and check how the module is split, at every start (decision 12).

    Returns:
        None without tensor parallelism.

    Raises:
        PlanError: nothing can be split, or a part cannot and the plan is strict.
    """
    degree, policy = program.tensor.size, program.plan
    if degree == 1:
        return None
    layout = policy.layout
    split = plan_by_policy(
        policy, record, degree, staged=program.pipe.size > 1, opaque=may_split_experts(layout)
    )
    return check_blocks(program.module, split, program.tensor, strict=policy.strict)


def may_split_experts(layout: Layout) -> bool:
    """Return whether tp may split expert layers inside blocks: neither cp nor ep divides them."""
    return layout.ep == 1 and layout.cp == 1


def plan_by_policy(
    policy: TensorPolicy, record: ForwardRecord, degree: int, *, staged: bool, opaque: bool
) -> ModelSplit:
    """Plan how a model is split over `degree` ranks under a policy.

    Args:
        staged: a pipeline cuts the model too.
        opaque: untraceable parts may be one operation of a block's graph.

    Raises:
        PlanError: as `plan`.
    """
    return plan_split(
        record,
        degree,
        staged=staged,
        strict=policy.strict,
        overrides=policy.overrides,
        sequence=policy.sequence_parallel != "off",
        opaque=opaque,
    )


def kinds(program: Program) -> list[ShardKind]:
    """Return the kinds of shards on the ranks of tp that may cross between stages."""
    return [(program.tensor, SequenceShard)]
