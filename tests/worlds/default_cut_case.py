"""Legs of a loop of one's own without a micro-batch, on changing ranks, through one run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.data.streams.webdataset import TarSamples
from shoal.fabric import World, start_world
from shoal.trainer.parallelize import parallelize

BATCH, SAMPLES, WIDTH = 24, 204, 6


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that follow from their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return inputs, torch.tensor(index % 3)


def of_shard(sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample of the shards, by its name."""
    return Numbers()[int(sample["__key__"][-6:])]


def model() -> nn.Module:
    """Dropout and BatchNorm, which belong to a micro-batch."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    ).double()


def leg(
    world: World, folder: str, steps: int, shards: str = "", layout: Any = "ddp", **more: Any
) -> dict[str, Any]:
    """Go on for some steps, and save.

    Gives the micro-batch, passes and sample numbers of each step of this rank, where it began, its
    losses, and what was told by then.
    """
    data = TarSamples(shards, decode=of_shard) if shards else Numbers()
    run = parallelize(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        layout=layout if world.size > 1 else "single",
        batch=BATCH,
        seed=3,
        precision="fp64",
        folder=folder,
        world=start_world() if world.size > 1 else world,
        **more,
    )
    run.restore()
    began, loader, ids, passes, losses = run.step_count, run.loader(data), [], [], []
    while len(passes) < steps:
        for batch in loader:
            losses.append(run.step(batch).loss)
            passes.append(len(batch))
            ids.append([n for some in batch.sample_ids for n in some])
            if len(passes) == steps:
                break
    run.save()
    epoch = run.epoch
    run.close()
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return {
        "micro_batch": run.plan.micro_batch, "passes": passes, "ids": ids, "began": began,
        "losses": losses, "epoch": epoch,
        "told": [one.get("text", "") + " ".join(one.get("differs", [])) for one in told],
    }  # fmt: skip


class Uncounted(nn.Module):
    """Decides by its numbers which way it takes: shapes alone cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3).double()
        self.table = nn.Parameter(torch.zeros(5_000_000, dtype=torch.float64))  # too large to pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.table[:3]
        return out * 2 if float(out.detach().sum()) > 0 else out


def uncounted(world: World, folder: str, layout: str) -> dict[str, Any]:
    """One step of such a model."""
    run = parallelize(
        Uncounted, lambda p: torch.optim.SGD(p, lr=0.05), layout=layout, batch=BATCH,
        precision="fp64", folder=folder, world=start_world(),
    )  # fmt: skip
    batch = next(iter(run.loader(Numbers())))
    run.step(batch)
    run.close()
    events = Path(folder, "events.jsonl")
    lines = events.read_text().splitlines() if events.exists() else []
    told = [json.loads(line).get("text", "") for line in lines]
    return {"passes": [len(batch)], "told": told}
