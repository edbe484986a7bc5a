"""Checks inside a world of processes: recomputed blocks under `ddp` and under FSDP2."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import cases
import shoal
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.models.loss import token_loss
from shoal.parallel import dropout_rng, recompute
from shoal.parallel.program import Program, make_undivided_program

POLICIES = ("none", "selective", "full")


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def trained(world: World, case: str, layout: str, policy: str) -> dict[str, Any]:
    """An epoch with accumulation and dropout: losses, and digests of this rank's part."""
    run = shoal.parallelize(
        cases.build(case),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        cases.loss(case),
        layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision="fp64",
        clip=0.5,
        seed=3,
        world=world,
    )
    run.program = recompute.apply(run.program.but(recompute=policy))
    local = {name: part.parameter for name, part in run.program.local.items()}
    rows = []
    for batch in run.loader(cases.dataset(case)):
        result = run.step(batch)
        found = {n: p.grad for n, p in local.items() if p.grad is not None}
        rows.append([result.loss, result.grad_norm, digest(found)])
    names = list(run.state_dict())
    evaluated = run.evaluate(cases.dataset(case))["loss"]
    for undo in run.program.on_close:
        undo()
    return {
        "rows": rows,
        "weights": digest({**local, **dict(run.model.named_buffers())}),
        "evaluated": evaluated,
        "same_names": names == list(cases.build(case).state_dict()),
    }


def fsdp(world: World) -> dict[str, dict[str, Any]]:
    """Blocks that recompute and are then sharded: gradients, gathers and live forwards by policy."""
    return {policy: _fsdp(world, policy) for policy in POLICIES}


def _fsdp(world: World, policy: str) -> dict[str, Any]:
    model = cases.build("llama").double()
    plan = Plan(Layout(dp_shard=world.size), 8, 2, 2, compute="fp64")
    program = make_undivided_program(model, plan, world)
    program = recompute.apply(dropout_rng.apply(program, 3).but(recompute=policy))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    generator = torch.Generator().manual_seed(world.rank)
    _micro_batch(program, 0, generator)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        _micro_batch(program, 1, generator)
    gathers = sum(e.count for e in recorded.key_averages() if "allgather" in e.key.lower())
    whole = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(9))
        hidden = model(tokens).hidden
    return {"gradients": digest(whole), "gathers": gathers, "evaluated": digest({"h": hidden})}


def _micro_batch(program: Program, index: int, generator: torch.Generator) -> None:
    tokens = torch.randint(61, (2, 12), generator=generator)
    with ExitStack() as around:
        for enter in program.around:
            around.enter_context(enter(0, index))
        token_loss(program.module(tokens), tokens)[0].backward()


def fsdp_undo(world: World) -> bool:
    """What recompute replaced can be taken away after FSDP2 changed the blocks' classes."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    plan = Plan(Layout(dp_shard=world.size), 8, 2, 2, compute="fp64")
    program = make_undivided_program(model, plan, world)
    program = recompute.apply(program.but(recompute="full"))
    fully_shard(model[0])
    for undo in program.on_close:
        undo()
    model(torch.ones(2, 4)).sum().backward()
    return "forward" not in model[0].__dict__
