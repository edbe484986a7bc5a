"""What the tests of number formats run on every member of a world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import cases
import shoal
from shoal.fabric import World
from shoal.fabric.device import select_local_device
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.parallel.build.full_state import gather_weights


def alone() -> World:
    """A world of this process only."""
    return World(ProcessInfo(), select_local_device(0, 1, bound=False), None)


def train(
    world: World,
    layout: str,
    precision: str,
    steps: int = 3,
    case: str = "llama",
    **settings: Any,
) -> dict[str, Any]:
    """Train a case for an epoch; losses, what is kept in which format, and whether all agree."""
    run = shoal.parallelize(
        cases.build(case),
        lambda p: torch.optim.AdamW(p, lr=0.003, fused=True),
        cases.loss(case),
        layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision=precision,
        clip=0.5,
        seed=3,
        world=world,
        **settings,
    )
    loader = run.loader(cases.dataset(case))
    losses = []
    while run.step_count < steps:
        for batch in loader:
            losses.append(run.step(batch).loss)
            if run.step_count >= steps:
                break
    weights = gather_weights(run.program)
    everyone = run.world.gather_json([float(t.double().sum()) for t in weights.values()])
    told = {
        "losses": losses,
        "module": sorted({str(p.dtype) for p in run.model.parameters()}),
        "stepped": sorted({str(one.parameter.dtype) for one in run.program.local.values()}),
        "kept": sorted({str(t.dtype) for t in weights.values()}),
        "agree": all(other == everyone[0] for other in everyone),
        "evaluated": run.evaluate(cases.dataset(case))["loss"],
    }
    for undo in run.program.on_close:
        undo()
    return told


def overflow(world: World, layout: str, folder: str, guilty: int = 1) -> dict[str, Any]:
    """fp16, where one rank's gradients overflow at step 3 and nobody else's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    now = {"step": 0}

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = (outputs - targets).pow(2)
        if now["step"] == 3 and world.rank == guilty:
            values = values * torch.ones_like(values).requires_grad_().clone()
            values.register_hook(lambda g: g * 1e30 * 1e30)
        return values

    run = shoal.parallelize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.01),
        loss,
        layout,
        precision="fp16",
        seed=3,
        skip_limit=1,
        world=world,
        folder=Path(folder) / f"{layout}-{world.size}",
    )
    run.loss_scale.value = 256.0  # what this model itself can take
    generator = torch.Generator().manual_seed(world.rank)
    rows = []
    for step in range(1, 6):
        now["step"] = step
        batch = torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)
        result = run.step(batch)
        rows.append([result.skipped, run.loss_scale.value, result.loss])
    run.save()
    weights = [float(w.sum()) for w in gather_weights(run.program).values()]
    run.loss_scale.value = 1.0
    run.restore()
    world.barrier()
    events = (run.recorder.folder / "events.jsonl").read_text().splitlines()
    lowered = [e for e in map(json.loads, events) if e["event"] == "loss_scale_lowered"]
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()
    return {"rows": rows, "weights": weights, "restored": run.loss_scale.value, "events": lowered}
