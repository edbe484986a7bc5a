"""Derive which ranks hold every tensor of a model under a layout.

`derive_division` finds how the model can be divided, from the record of its forward pass.
`derive_placements` turns that and the layout into one `Placement` per parameter and buffer. Neither
needs another process, so a plan can be placed before anything starts. `compose.place` does the same
and checks the parts on the ranks before they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import BlocksPolicy
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan
from shoal.parallel import precision
from shoal.parallel.program import dtype_of
from shoal.trace.find.blocks import fsdp_blocks

if TYPE_CHECKING:
    from shoal.parallel.context_parallel.split_units import SequenceUnits
    from shoal.parallel.expert_parallel import Experts
    from shoal.parallel.pipeline.partition_model import StageCut
    from shoal.parallel.spmd.split_block import ModelSplit
    from shoal.trace.flow.forward_record import ForwardRecord

Rows = dict[str, Placement]


@dataclass(frozen=True)
class BlockCalls:
    """Numbers of calls of modules in a forward pass, and the repeated blocks.

    Attributes:
        times: calls by name; absent: one call.
        blocks: blocks that are called often, of a model without ModuleLists or block attributes.
        reached: blocks with a submodule that is called from outside the block.
    """

    times: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ModelDivision:
    """Division of a model along each axis.

    Attributes:
        split, cut: the division under tp and under pp.
        experts: layers whose experts ep distributes.
        units: modules that share a sequence under cp.
        called: number of calls of blocks, for zero 3.
    """

    split: ModelSplit | None = None
    cut: StageCut | None = None
    experts: Sequence[Experts] = ()
    units: SequenceUnits | None = None
    called: BlockCalls = BlockCalls()


def derive_division(record: ForwardRecord, plan: Plan) -> ModelDivision:
    """Derive the division of a model under a plan's layout, without checking it on the ranks.

    Raises:
        PlanError: the model cannot be divided so; the text names the part and the nearest choice.
    """
    layout = plan.layout
    split, cut = None, None
    experts: Sequence[Experts] = ()
    if layout.ep > 1:
        from shoal.parallel.expert_parallel import plan_layers

        experts = plan_layers(record, layout)
    if layout.pp > 1:
        from shoal.parallel.pipeline import cut_into_stages

        cut = cut_into_stages(record, layout)
    if layout.tp > 1:
        from shoal.parallel.tensor_parallel import may_split_experts, plan_by_policy

        opaque = may_split_experts(layout)
        split = plan_by_policy(plan, record, layout.tp, staged=layout.pp > 1, opaque=opaque)
    called = count_block_calls(record) if layout.zero == 3 else BlockCalls()
    return ModelDivision(split, cut, experts, called=called)


def derive_placements(
    module: nn.Module, plan: Plan, derived: ModelDivision, device: torch.device
) -> Rows:
    """Return the placement of every parameter and buffer: the ranks that hold, sum and step it.

    Args:
        module: whole; its values do not matter.
        device: of the ranks: not all kinds of device read narrow copies.

    Raises:
        PlanError: a stack of experts that tp has cut already.
    """
    rows = _whole_placements(module, plan, device)
    if derived.split is not None:
        from shoal.parallel import tensor_parallel

        rows = tensor_parallel.place(rows, derived.split)
    if plan.layout.cp > 1:
        rows = {
            name: replace(row, sum_over=(*row.sum_over, "cp")) if row.trains else row
            for name, row in rows.items()
        }
    if derived.cut is not None:
        from shoal.parallel import pipeline

        rows = pipeline.place(rows, derived.cut, plan.layout)
    if plan.layout.serves:
        from shoal.parallel.data_parallel import embedding_tables

        rows = embedding_tables.place(rows, module, plan.layout)
    if derived.experts:
        from shoal.parallel import expert_parallel

        rows = expert_parallel.place(rows, derived.experts, module, plan.layout)
    rows = {name: _add_data_axes(row, plan.layout) for name, row in rows.items()}
    return _assign_units(rows, module, plan, derived.called) if plan.layout.zero == 3 else rows


def _whole_placements(module: nn.Module, plan: Plan, device: torch.device) -> Rows:
    """Return the placements of a module that nothing divides."""
    narrow = precision.list_narrow_copies(module, plan, device)
    rows = {}
    for name, p in module.named_parameters():
        compute = narrow.get(name, "")
        rows[name] = Placement(name, tuple(p.shape), dtype_of(p), p.requires_grad, compute)
    for name, buffer in module.named_buffers():
        rows[name] = Placement(name, tuple(buffer.shape), dtype_of(buffer), is_buffer=True)
    return rows


def count_block_calls(record: ForwardRecord) -> BlockCalls:
    """Return how often the forward pass of a record called blocks."""
    often = {name: times for name, times in record.call_counts.items() if times > 1}
    blocks = () if record.trunk.leaf else record.trunk.blocks
    reached = record.externally_called_blocks(
        name for name, _ in record.module.named_modules() if name
    )
    return BlockCalls(often, blocks, frozenset(reached))


def _assign_units(rows: Rows, module: nn.Module, plan: Plan, called: BlockCalls) -> Rows:
    """Note with which block each tensor is gathered under zero 3; experts have their own units."""
    from shoal.base.layouts.resharding import gathers_all_blocks

    names = {id(p): name for name, p in module.named_parameters()}
    found = dict(rows)
    units = fsdp_blocks(module, plan)
    units = units or fsdp_blocks(module, BlocksPolicy(blocks=called.blocks))
    for unit, block in units.items():
        if unit in called.reached:
            continue  # gathered with the root: its submodule is called without the unit
        times = called.times.get(unit, 1)
        for parameter in block.parameters():
            row = found[names[id(parameter)]]
            # A stage that makes only some of the unit's calls would gather it for the other calls.
            partly = times > 1 and len(row.stages) > 1
            if row.data == "rows" and not row.is_expert and not partly:
                found[row.name] = replace(row, unit=unit, calls=times)
    dealt = [row for row in found.values() if row.unit and not row.is_expert]
    blocks, elements = len({row.unit for row in dealt}), sum(row.elements for row in dealt)
    if gathers_all_blocks(blocks, elements, plan.names_blocks):
        found |= {row.name: replace(row, unit="", calls=1) for row in dealt}
    return found


def _add_data_axes(row: Placement, layout: Layout) -> Placement:
    """Return a placement with the data-parallel axes added, whatever else divides the tensor."""
    if row.is_buffer:
        return row
    axes = tuple(axis for axis in row.data_axes if row.degree(axis, layout) > 1)
    data = ("whole", "states", "states", "rows")[layout.zero]
    undealt = not row.elements or not row.shape or row.degree(row.data_axes[1], layout) == 1
    if data == "rows" and undealt:
        data = "whole"  # no elements, a scalar without rows, or one rank on the axis
    if data == "states" and not (row.trains and axes):
        data = "whole"
    return replace(row, sum_over=(*axes, *row.sum_over) if row.trains else (), data=data)
