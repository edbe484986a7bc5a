"""Whole runs of two copies of a model fed from both ends, by the battery of `shoal prove`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, default_collate

import cases
from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.models.catalog import build as catalog
from shoal.proof import Battery, Trial, TrialSide
from shoal.proof.battery import SGD
from shoal.trainer.parallelize import parallelize
from shoal.trainer.step.optimizer_step import StepResult

BATCH, MICRO_BATCH = 16, 2
"""Eight micro-batches, what four ranks need at least."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": True},
    ),
    "gpt": ("gpt", {"dim": 32, "layers": 4, "heads": 4, "dropout": 0.1}),
    "resnet": ("resnet", {"channels": 4, "stages": 2}),
}


def trial_of(model: str, samples: int) -> Trial:
    """What both sides train: steps of `samples` samples, the last one short."""
    name, arguments = MODELS[model]
    words = name != "resnet"
    data = Subset(cases.Tokens() if words else cases.Images(), range(samples))

    def build() -> nn.Module:
        torch.manual_seed(7)
        sizes = {"vocabulary": 61, "sequence": 12} if words else {}
        return catalog(name, arguments, **sizes)

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        run = side.parallelize(
            build,
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            sample=lambda: default_collate([data[k] for k in range(3)]),
        )
        loader = run.loader(data)
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


@functools.cache
def battery(model: str, samples: int) -> Battery:
    """One battery per process: the twin's records serve every layout."""
    made = Battery(trial_of(model, samples), steps=3)
    return replace(made, optimizers={SGD: made.optimizers[SGD]})


def prove(world: World, model: str, layout: dict[str, Any], samples: int) -> dict[str, Any]:
    """The battery's report of a model on a layout."""
    torch.set_num_threads(1)
    return battery(model, samples).prove(world, layout)


class Counting(nn.Module):
    """A block that counts how often it ran, in a buffer that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x + torch.tanh(self.linear(x))


def loose(world: World) -> list[list[float]]:
    """The buffers of this rank's blocks after two steps; empty for blocks of other ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(4)))
    inputs, targets = torch.randn(BATCH, 8), torch.randint(8, (BATCH,))
    run = parallelize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        layout={"pp": world.size, "schedule": "dualpipe"},
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        sample=(inputs, targets),
        world=world,
    )
    for _ in range(2):
        run.step((inputs, targets))
    found = [[float(v) for v in b.mean] if not b.mean.is_meta else [] for b in model]
    for undo in run.program.on_close:
        undo()
    return found


def refused(world: World, recompute: str) -> str:
    """What is said of blocks that are computed twice in a backward of two halves."""
    tokens = default_collate([cases.Tokens()[k] for k in range(3)])
    try:
        parallelize(
            catalog("gpt", {"dim": 32, "layers": 4, "heads": 4}, vocabulary=61, sequence=12),
            lambda p: torch.optim.SGD(p, lr=0.1),
            layout={"pp": world.size, "schedule": "dualpipe"},
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            recompute=recompute,
            sample=tokens,
            world=world,
        )
    except PlanError as cannot:
        return str(cannot)
    return ""
