"""Runs steps under a layout, and tells what a rank really held, saved and summed."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import any_case
from shoal.base.plans.plan import Plan
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.fabric import World
from shoal.forecast.memory import placed_bytes
from shoal.machine.states import count_state_bytes
from shoal.parallel.build.full_state import local_state
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

SUMMING = ("shoal.parallel.data_parallel", "shoal.fabric.collectives.sharded_collectives")
"""Where sums of gradients and gathers of weights are asked for, and nothing else that travels."""


def measure_all(world: World, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer of this rank for every case."""
    return [measure(world, **one) for one in wanted]


def measure(
    world: World,
    model: str,
    layout: Any,
    folder: str,
    precision: str = "fp32",
    frozen: str = "",
    micro_batches: int = 2,
    per_node: int = 0,
    **policies: Any,
) -> dict[str, Any]:
    """Two steps; figures are of the second, states of the moment before its update.

    frozen     parameters whose names hold this do not train
    per_node   ranks that are taken to share a machine; 0: as it is
    """
    build, data, loss = _model(model)

    def built() -> torch.nn.Module:
        torch.manual_seed(0)
        module = build().float()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))
        return module

    names = [name for name, _ in built().named_parameters()]
    degree = world.size // _model_ranks(layout)
    local_size = world.local_size
    world.local_size = per_node or local_size
    few = torch.utils.data.default_collate([data[k] for k in range(3)])
    run = parallelize(
        built,
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        loss,
        layout=layout,
        batch=2 * micro_batches * degree,
        micro_batch=2,
        precision=precision,
        sample=few,
        folder=folder,
        world=world,
        **policies,
    )
    start = run.program.data.rank  # each data rank its own samples
    own = [data[start + k] for k in range(2 * micro_batches)]
    batch = torch.utils.data.default_collate(own)
    run.step(batch)
    heard = _heard(run, batch)
    run.forward_backward(batch)
    counted = count_state_bytes(run)
    run.update()
    shards = {name: shard.slices for name, (_, shard) in local_state(run.program).items()}
    run.save()
    told = {
        "names": names,
        "plan": run.plan.to_json(),
        "states": [counted.weights, counted.gradients, counted.optimizer],
        "buckets": [list(bucket.names) for bucket in run.plan.buckets],
        "sums": [[*call, n] for call, n in heard.items() if call[0] != "all_gather"],
        "gathers": [[*call, n] for call, n in heard.items() if call[0] == "all_gather"],
        "slices": shards,
        "file": _file(Path(folder)) if world.is_first else {},
        **_foreseen(run.plan, world.rank, world.local_size),
    }
    world.local_size = local_size
    for undo in run.program.on_close:
        undo()
    return told


def _model(name: str) -> tuple[Any, Any, Any]:
    """What builds it, its samples in fp32, its loss (None: ours)."""
    if name in any_case.OURS:
        return *any_case._our_model(name), None
    example = any_case.example_of(name)
    data = any_case.Samples(example.inputs)
    if data.whole.is_floating_point():
        data.whole = data.whole.float()
    return example.build, data, any_case.any_loss


def _model_ranks(layout: Any) -> int:
    """Ranks that share one model's work."""
    axes = layout if isinstance(layout, dict) else {}
    return axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1)


def _heard(run: Run, batch: Any) -> Counter[tuple[str, int, int]]:
    """What data parallelism sends in one step: (kind, payload bytes, degree) → how often."""
    found: Counter[tuple[str, int, int]] = Counter()
    traffic = run.program.world.traffic
    count = traffic.count

    def hear(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        callers = [sys._getframe(n).f_globals["__name__"] for n in range(1, 4)]
        asked = any(caller.startswith(SUMMING) for caller in callers)
        if asked and degree > 1:
            found[kind, payload_bytes, degree] += 1
        count(kind, payload_bytes, degree, *axis)

    traffic.count = hear
    run.step(batch)
    del traffic.count
    return found


def _foreseen(plan: Plan, rank: int, per_node: int) -> dict[str, Any]:
    """The planner's figures of the same rank, from the rows as they are written."""
    plan = replace(Plan.from_json(plan.to_json()), buckets=())
    sums = Counter(tuple(one) for one in placed_bytes.gradient_sums(plan, rank))
    gathers = Counter(tuple(one) for one in placed_bytes.weight_gathers(plan, rank, per_node))
    return {
        "planned states": list(placed_bytes.placed_state_bytes(plan, rank, 4)),
        "planned sums": [[*call, times] for call, times in sums.items()],
        "planned gathers": [[*call, times] for call, times in gathers.items()],
    }


def _file(folder: Path) -> dict[str, Any]:
    """Slices of every tensor of the model in the newest checkpoint."""
    manifest = read_manifest(list_checkpoints(folder / "checkpoints")[0].path)
    return {
        name.removeprefix("model."): [list(tensor.shape), [one.box for one in tensor.slices]]
        for name, tensor in manifest.tensors.items()
        if name.startswith("model.")
    }
