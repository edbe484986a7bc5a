"""Pipeline: ranks hold runs of layers, and micro-batches travel through them.

Where the model is cut is found by watching one forward pass (`pipe/`); the order in which ranks
work is the plan's action list, which was checked when it was made. Every rank runs the user's own
forward with the other stages' blocks left out, so a stage needs its own weights only: the others
are let go. Weights that two stages use (a tied embedding and head) are held by both, and their
gradients are summed once a step.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from shoal.base.plan import Plan
from shoal.base.schedules import stages_per_rank
from shoal.fabric.axes import among, members
from shoal.parallel.pipe.crossing import Crossing
from shoal.parallel.pipe.cut import cut_stages
from shoal.parallel.pipe.deal import StageCut
from shoal.parallel.pipe.foreign import drop_foreign
from shoal.parallel.pipe.runtime import PipeRuntime
from shoal.parallel.pipe.stage import Stages
from shoal.parallel.program import Program, frozen, trainable
from shoal.parallel.trunk import find_trunk
from shoal.planner.schedules import make_schedule


def plan(program: Program, run: Callable[[nn.Module], Any]) -> StageCut | None:
    """Where the stages begin and end; None without a pipeline.

    run      does one forward pass on a sample
    Errors   PlanError for more stages than blocks, or a model that cannot be cut
    """
    layout = program.plan.layout
    if layout.pp == 1:
        return None
    stages = layout.pp * stages_per_rank(layout.schedule, layout.chunks)
    trunk = find_trunk(program.module, run)
    return cut_stages(program.module, trunk, run, stages)


def apply(program: Program, cut: StageCut | None, crossing: Crossing) -> Program:
    """Keep this rank's stages, and run steps by the plan's schedule.

    crossing   how values travel from stage to stage
    """
    if cut is None:
        return program
    layout, module = program.plan.layout, program.module
    make = _schedules(program.plan)
    stage_rank = make(program.plan.accumulate).stage_rank
    own = [stage for stage, rank in enumerate(stage_rank) if rank == program.pipe.rank]
    stages = Stages(module, cut, own)
    drop_foreign(module, {name for stage in own for name in cut.keep[stage]})
    runtime = PipeRuntime(stages.stages, stage_rank, program.pipe, make, crossing)
    holders, joined = dict(program.holders), dict(program.joined)
    lines = members(layout.degrees, ["pp"])
    for name, where in cut.ties.items():
        ranks = sorted({stage_rank[stage] for stage in where})
        if len(ranks) == 1:
            continue
        # Every rank of the run makes the group, also those that hold no part of it.
        sharers = among(program.world, [tuple(line[rank] for rank in ranks) for line in lines])
        if program.pipe.rank in ranks:
            holders[name] = holders.get(name, 1) * len(ranks)
            joined[name] = (*joined.get(name, ()), sharers)
    return replace(
        program,
        parameters=trainable(module),
        frozen=frozen(module),
        holders=holders,
        joined=joined,
        run=runtime.run,
        forward=lambda program, one: runtime.forward_only(one),
        on_evaluated=(*program.on_evaluated, runtime.settle),
        on_close=(*program.on_close, stages.take_away),
    )


def _schedules(plan: Plan) -> Callable[[int], Any]:
    layout = plan.layout
    # zbv and dualpipe hold two stages per rank by themselves.
    chunks = layout.chunks if layout.schedule == "interleaved" else 1
    return partial(_schedule, layout.schedule, layout.pp, chunks)


def _schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> Any:
    return make_schedule(name, ranks, micro_batches, chunks)
