"""Legs of one training run, each on another layout, through one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cases
from shoal.fabric import World, start_world
from shoal.optim.lamb import LAMB
from shoal.optim.lion import Lion
from shoal.optim.muon import MuonWithAdamW
from shoal.parallel.whole import gather_weights
from shoal.trainer.parallelize import parallelize

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lamb": lambda p: LAMB(p, lr=1e-2),
    "muon": lambda p: MuonWithAdamW(p, lr=1e-2),
}
SLICED, WHOLE = ("sgd", "adamw", "lion", "rmsprop"), ("adafactor", "lamb", "muon")


def leg(
    world: World, folder: str, wanted: list[list[str]], layout: Any, steps: int
) -> dict[str, dict[str, Any]]:
    """Go on with every (case, optimizer) for some steps on a layout, and save.

    Gives, by "case optimizer": [loss, gradient norm] per step, which parameters this rank steps,
    at which step it began (-1: nothing was there to restore), and a number per whole weight.
    """
    return {
        f"{case} {optimizer}": train(
            start_world() if world.size > 1 else world,
            Path(folder, f"{case}-{optimizer}"),
            case,
            optimizer,
            layout,
            steps,
        )
        for case, optimizer in wanted
    }


def train(
    world: World, folder: Path, case: str, optimizer: str, layout: Any, steps: int
) -> dict[str, Any]:
    """What `leg` gives of one run; the world stays open for others."""
    run = parallelize(
        lambda: cases.build(case),
        OPTIMIZERS[optimizer],
        cases.loss(case),
        layout=layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision="fp64",
        clip=1.0,
        seed=3,
        folder=folder,
        world=world,
    )
    restored = run.restore()
    began, curve = run.step_count, []
    loader = run.loader(cases.dataset(case))
    while len(curve) < steps:
        for batch in loader:
            result = run.step(batch)
            curve.append([result.loss, result.grad_norm])
            if len(curve) == steps:
                break
    weights = gather_weights(run.program)
    ramps = {n: torch.linspace(1, 2, w.numel(), dtype=torch.float64) for n, w in weights.items()}
    answer = {
        "curve": curve,
        "steps": sorted(run.program.local),
        "began": began if restored else -1,
        "saved": run.save() is not None,
        "weights": {n: float(w.double().flatten() @ ramps[n]) for n, w in weights.items()},
    }
    run.close()
    return answer
