"""Rebind the optimizer to the tensors that this rank steps: whole parameters, or its part of each.

`optim/optimizer_support.py` decides beforehand whether a part may be stepped alone. If not, zero1
and zero2 assign whole parameters to owner ranks; fsdp shards every parameter, so it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.plans.plan import Plan
from shoal.base.plans.tensor_shards import Shard, StepDivisibility
from shoal.optim.optimizer_support import determine_slicing
from shoal.parallel.program import Program


def plan_for_optimizer(
    optimizer: torch.optim.Optimizer, program: Program
) -> tuple[Plan, list[str]]:
    """Return the plan with its buckets sharded as this optimizer allows, and lines for the user.

    Raises:
        PlanError: the optimizer's state cannot be split as the layout requires.
    """
    plan = program.plan
    stage = plan.layout.zero
    if not stage and not program.cuts and program.pipe.size == 1:
        return plan, []
    allowed = determine_slicing(optimizer)
    name = type(optimizer).__name__
    _check_sharding(program, allowed)
    if not stage:
        return plan, []
    if stage == 3:
        if allowed.rows:
            nearest = "layout.strategy=ddp" if allowed.apart else "layout.strategy=zero2"
            raise PlanError(
                f"layout.strategy = {plan.layout.strategy}: cuts every parameter by rows, and "
                f"{allowed.rows}; try: {nearest}"
            )
        return plan, []
    if allowed.flat and allowed.apart:
        raise PlanError(
            f"layout.strategy = {plan.layout.strategy}: no rank sees all parameters, and "
            f"{allowed.apart}; try: layout.strategy=ddp"
        )
    from shoal.planning.bucket_shards import cut_buckets  # only stages 1 and 2 of zero cut them

    whole, rank = bool(allowed.flat), program.world.rank
    buckets = cut_buckets(plan.buckets, plan.placements, plan.layout, rank, whole_parameters=whole)
    ranks = plan.layout.servers or plan.layout.dp_shard
    lines = [f"{name} steps whole parameters: each has one owner among {ranks} ranks"]
    return replace(plan, buckets=buckets), lines if whole else []


def _check_sharding(program: Program, allowed: StepDivisibility) -> None:
    """Raise PlanError if tp, pp, ep or servers shard weights that this optimizer needs whole."""
    layout = program.plan.layout
    axes = {cut.axis for cut in program.cuts.values()}
    if "ep" in axes and allowed.rows:
        raise PlanError(
            f"layout.ep = {layout.ep}: cuts stacks of experts by rows, and {allowed.rows}; "
            f"try: layout.ep=1, or optimizer.name=adamw"
        )
    if "tp" in axes and allowed.flat:
        raise PlanError(
            f"layout.tp = {layout.tp}: cuts weights inside, and {allowed.flat}; try: "
            f"layout.tp=1, or optimizer.name=adamw"
        )
    if "servers" in axes:
        from shoal.parallel.data_parallel.embedding_tables import check_optimizer

        check_optimizer(layout, allowed)
    if program.pipe.size > 1 and allowed.apart:
        raise PlanError(
            f"layout.pp = {layout.pp}: no rank sees all parameters, and {allowed.apart}; try: "
            f"layout.pp=1, or optimizer.name=adamw"
        )


def shard_param_groups(
    optimizer: torch.optim.Optimizer, originals: Mapping[str, nn.Parameter], program: Program
) -> None:
    """Replace `originals` in the optimizer's groups by this rank's parts."""
    local = program.local
    if all(name in local and local[name].parameter is p for name, p in originals.items()):
        for name in program.cuts.keys() & originals.keys():  # cut in place, as the weight is
            _cut_state(optimizer, originals[name], local[name].shard)
        return
    from shoal.optim.sharded_optimizer import shard_optimizer

    shards = {id(p): local[name].shard for name, p in originals.items() if name in local}

    def cut(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return extract_shard(tensor, shards[id(parameter)])

    pieces: dict[torch.Tensor, nn.Parameter | None] = {
        p: local[name].parameter if name in local else None for name, p in originals.items()
    }
    for group in optimizer.param_groups:
        # The optimizer never steps them; under fsdp the module no longer has them.
        pieces.update({p: None for p in group["params"] if not p.requires_grad})
    shard_optimizer(optimizer, pieces, cut)


def _cut_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, shard: Shard) -> None:
    """Cut the state that an optimizer made with itself, for a whole weight."""
    for key, value in optimizer.state.get(parameter, {}).items():
        whole = isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shard.global_shape)
        if whole and value.shape != parameter.shape:
            optimizer.state[parameter][key] = extract_shard(value, shard).view(parameter.shape)


def extract_shard(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the elements of a whole tensor that a shard describes, flat."""
    boxes = [tensor[tuple(slice(start, stop) for start, stop in box)] for box in shard.slices]
    return torch.cat([box.reshape(-1) for box in boxes])
