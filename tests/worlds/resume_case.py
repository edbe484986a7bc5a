"""Legs of one training run, each on another layout, through one run folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn
from torch.utils.data import default_collate

import cases
from shoal.checkpoint.export.export_file import export_file
from shoal.checkpoint.format.listing import verify
from shoal.fabric import World, start_world
from shoal.models.catalog import build as catalog
from shoal.optim.lamb import LAMB
from shoal.optim.lion import Lion
from shoal.optim.muon import MuonWithAdamW
from shoal.parallel.build.full_state import assemble_tensors, gather_weights
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lamb": lambda p: LAMB(p, lr=1e-2),
    "muon": lambda p: MuonWithAdamW(p, lr=1e-2),
}
DEEP = {
    "fused": ("gpt", {"dim": 32, "layers": 4, "heads": 4, "dropout": 0.1}),
    "grouped": ("llama", {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1}),
}
"""Enough layers for four stages: one projection for q, k and v; fewer key heads than 4 ranks."""
PARTS = (*DEEP, "columns")
"""Cases for tensor and pipeline parallelism."""
SLICED, WHOLE = ("sgd", "adamw", "lion", "rmsprop"), ("adafactor", "lamb", "muon")


def leg(
    world: World, folder: str, wanted: list[list[str]], layout: Any, steps: int
) -> dict[str, dict[str, Any]]:
    """Go on with every (case, optimizer) for some steps on a layout, and save.

    Gives, by "case optimizer": [loss, gradient norm] per step, which parameters this rank steps,
    at which step it began (-1: nothing was there to restore), a number per whole weight and per
    averaged one, and on the first rank what is wrong with the file that an export makes.
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


class Columns(nn.Module):
    """A linear layer whose weight is [inputs, outputs], as GPT-2's own are."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().t().contiguous())
        self.bias = nn.Parameter(like.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def columns() -> nn.Module:
    """A GPT with a tied head and q, k and v in the columns of one weight."""
    torch.manual_seed(7)
    model = cases.GPT(dim=24, layers=4)
    for block in model.blocks:
        block.heads, block.qkv = 4, Columns(block.qkv)
    return model


def build(case: str) -> nn.Module:
    """One of `PARTS`, or of the battery's models; float32, with fixed weights."""
    if case == "columns":
        return columns()
    if case not in DEEP:
        return cases.build(case)
    torch.manual_seed(7)
    name, arguments = DEEP[case]
    return catalog(name, arguments, vocabulary=61, sequence=12)


def dataset(case: str) -> Any:
    """The data that goes with it."""
    return cases.Tokens() if case in PARTS else cases.dataset(case)


def train(
    world: World, folder: Path, case: str, optimizer: str, layout: Any, steps: int
) -> dict[str, Any]:
    """What `leg` gives of one run; the world stays open for others.

    The cases for tensor and pipeline parallelism are averaged too, and saved beside every step.
    """
    data, parts = dataset(case), case in PARTS
    run = parallelize(
        lambda: build(case),
        OPTIMIZERS[optimizer],
        cases.loss(case),
        layout=layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision="fp64",
        clip=1.0,
        seed=3,
        sample=lambda: default_collate([data[k] for k in range(3)]),
        average=0.5 if parts else 0.0,
        folder=folder,
        world=world,
    )
    restored = run.restore()
    began, curve = run.step_count, []
    loader = run.loader(data)
    while len(curve) < steps:
        for batch in loader:
            result = run.step(batch)
            curve.append([result.loss, result.grad_norm])
            if parts:
                run.save(wait=False)
            if len(curve) == steps:
                break
    weights = gather_weights(run.program)
    path = run.save()
    answer = {
        "curve": curve,
        "steps": sorted(run.program.local),
        "began": began if restored else -1,
        "saved": path is not None,
        "weights": numbers(weights),
        "averages": numbers(averages(run)),
        "wrong": wrong_export(path, weights, run.program.aliases)
        if path and parts and run.world.is_first
        else [],
    }
    run.close()
    return answer


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """One number per tensor, in which every element counts otherwise."""
    ramps = {n: torch.linspace(1, 2, t.numel(), dtype=torch.float64) for n, t in tensors.items()}
    return {n: float(t.double().flatten() @ ramps[n]) for n, t in tensors.items()}


def averages(run: Run) -> dict[str, torch.Tensor]:
    """The averaged weights, whole, on every rank."""
    kept = run.average.tensors() if run.average is not None else {}
    local = run.program.local
    return assemble_tensors(
        {name: (tensor, local[name].shard) for name, tensor in kept.items()}, run.world
    )


def wrong_export(
    path: Path, weights: dict[str, torch.Tensor], aliases: dict[str, str]
) -> list[str]:
    """What of a checkpoint is damaged, or comes out otherwise than the weights are."""
    wrong = verify(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        export_file(path, file)
        with safetensors.safe_open(file, "pt") as stored:
            names, told = set(stored.keys()), stored.metadata()
            wrong += [f"{n} in one only" for n in names ^ set(weights)]
            wrong += [n for n in names if not torch.equal(stored.get_tensor(n), weights[n])]
    if told != {**aliases, "format": "pt"}:
        wrong.append(f"ties are {told}")
    return wrong
