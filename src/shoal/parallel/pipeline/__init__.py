"""Pipeline parallelism: each rank holds a run of layers, and micro-batches pass from rank to rank.

A watched forward pass shows where the model can be cut (`trace/`). The order in which ranks
work is the plan's action list, which was checked when it was made. Every rank runs the user's own
forward without the other stages' blocks, so a stage needs only its own weights: the others
are freed. Weights on several ranks (a tied embedding and head, everything if the schedule holds
two copies of the model) have their gradients summed over those ranks once a step.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023;
DeepSeek-V3 technical report 2024 (DualPipe)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.base.errors import BugError, nearest_word
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import check_recompute as check_recompute
from shoal.base.layouts.schedule_names import check_stages, stages_of
from shoal.base.plans.pipeline_actions import PipelineSchedule
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.axis_worlds import list_axis_groups, partition_world
from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.parallel.pipeline.runtime import PipeRuntime
from shoal.parallel.pipeline.stage import PipelineStages
from shoal.parallel.pipeline.stage_tensors import ValuePacking
from shoal.parallel.program import Program, empty_on_meta, frozen_parameters, trainable_parameters
from shoal.planning.pipeline_schedules import make_schedule
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.collective_ban import ForbiddenCollective, forbid_collectives
from shoal.wire.phases import phase


@phase("cut stages")
def plan(program: Program, record: ForwardRecord) -> StageCut | None:
    """Return the cut of the model into stages; None without a pipeline.

    One rank of a machine traces the model and checks the cut, and sends it to the others. All ranks
    trace a model that communicates with other ranks, or whose blocks return more than plain values.

    Raises:
        PlanError: more stages than blocks, a model that cannot be cut, or a schedule that does not
            work with recompute.
    """
    layout, world = program.plan.layout, program.world
    if layout.pp == 1:
        return None
    own: list[StageCut] = []

    def first() -> Any:
        try:
            with forbid_collectives():
                own.append(cut_into_stages(record, layout))
        except ForbiddenCollective:
            return None
        return own[0].to_json()

    told = world.run_once_per_machine(first)
    if own:
        return own[0]
    if told is None:  # or the first rank failed: the others then fail with the same error
        return cut_into_stages(record, layout)
    return StageCut.from_json(told, record.module, world.device)


def cut_into_stages(record: ForwardRecord, layout: Layout) -> StageCut:
    """Return the cut of a traced model into the stages of a layout."""
    kind = type(record.module).__name__
    check_stages(layout.schedule, layout.pp, layout.chunks, len(record.trunk.calls), kind)
    return cut_stages(record, layout.stages)


def place(rows: Mapping[str, Placement], cut: StageCut, layout: Layout) -> dict[str, Placement]:
    """Return placements with each tensor's pipeline ranks; shared ones are summed over "pp"."""
    pieces = [
        [cut.keep[piece] for piece in stages_of(layout.schedule, layout.pp, rank, layout.stages)]
        for rank in range(layout.pp)
    ]
    found = {}
    for name, row in rows.items():
        ranks = tuple(r for r, own in enumerate(pieces) if any(name in kept for kept in own))
        over = (*row.sum_over, "pp") if row.trains and len(ranks) > 1 else row.sum_over
        found[name] = replace(row, stages=ranks, sum_over=over)
    return found


def apply(program: Program, cut: StageCut | None, crossing: ValuePacking) -> Program:
    """Keep this rank's stages, and run steps by the plan's schedule.

    Args:
        crossing: packs the values that pass from stage to stage.
    """
    if cut is None:
        return program
    module, rank = program.module, program.pipe.rank
    make = _schedules(program.plan)
    schedule = make(program.plan.accumulate)
    own = {
        s: s % schedule.stages_per_copy for s, at in enumerate(schedule.stage_rank) if at == rank
    }
    stages = PipelineStages(module, cut, own.values(), program.world.device)
    free_other_stages(module, {name for piece in own.values() for name in cut.keep[piece]})
    runtime = PipeRuntime(
        {stage: stages.stages[piece] for stage, piece in own.items()},
        schedule.stage_rank,
        program.pipe,
        make,
        crossing,
        schedule.copies,
    )
    return replace(
        program,
        parameters=trainable_parameters(module),
        frozen=frozen_parameters(module),
        mirrored=_mirrored_world(program, schedule),
        run=runtime.run,
        action_times=runtime.times,
        forward=lambda program, one: runtime.forward_only(one),
        on_evaluated=(*program.on_evaluated, runtime.wait_for_sends),
        on_close=(*program.on_close, stages.restore_forwards),
    )


def _mirrored_world(program: Program, schedule: PipelineSchedule) -> World | None:
    """Return the data ranks of all stages that hold the same pieces of the model as this rank."""
    if schedule.copies == 1:
        return None
    held: dict[frozenset[int], list[int]] = {}
    for rank in range(program.pipe.size):
        own = {
            s % schedule.stages_per_copy for s, at in enumerate(schedule.stage_rank) if at == rank
        }
        held.setdefault(frozenset(own), []).append(rank)
    each = program.data.size
    lines = list_axis_groups(program.plan.layout.degrees, ["pp", "dp_replicate", "dp_shard"])
    parts = [
        tuple(place for rank in ranks for place in line[rank * each : (rank + 1) * each])
        for line in lines
        for ranks in held.values()
    ]
    return partition_world(program.world, parts)


def _schedules(plan: Plan) -> Callable[[int], PipelineSchedule]:
    layout = plan.layout
    # zbv and dualpipe always hold two stages per rank.
    chunks = layout.chunks if layout.schedule == "interleaved" else 1
    return partial(make_schedule, layout.schedule, layout.pp, chunks=chunks)


def free_other_stages(module: nn.Module, keep: AbstractSet[str]) -> None:
    """Free other stages' weights, in place: they keep name, shape and dtype on the meta device.

    The module keeps its tree and all names, so that checkpoints, rules by name and error lines mean
    the same on every stage. Tied weights stay tied: one meta tensor under all names.

    Args:
        keep: first names, as `named_parameters` and `named_buffers` give them; a tied tensor is
            kept under all its names.

    Raises:
        BugError: a name in `keep` that the module does not have.
    """
    names = {
        id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for unknown in sorted(keep - set(names.values())):
        close = nearest_word(unknown, names.values())
        raise BugError(f"{unknown} is kept, and no tensor of the module; try: {close}")
    hollow: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or names[id(tensor)] in keep:
                    continue
                if id(tensor) not in hollow:
                    hollow[id(tensor)] = empty_on_meta(tensor)
                held[name] = hollow[id(tensor)]  # type: ignore[assignment]
