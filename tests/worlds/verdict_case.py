"""Models that a proof must not accuse: they cast on their way, or talk to other ranks themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce  # by its own name, as users import it

from planted import BUGS
from shoal.fabric import World
from shoal.proof import Battery, TrialSide
from shoal.proof.battery import SGD
from shoal.proof.start_proof import format_line
from shoal.trace.costs.flops import count_training_flops
from shoal.trainer.step.optimizer_step import StepResult

WIDTH = 16


class Block(nn.Module):
    """A norm that is computed in float32 whatever it is given, and a product behind it."""

    def __init__(self, blown: float) -> None:
        super().__init__()
        self.blown = blown
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.into = nn.Linear(WIDTH, 24)
        self.out = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.out(torch.tanh(self.into(x)))
        narrow = h.to(torch.float32)
        narrow = narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + 1e-6)
        return x + self.gain * torch.sin(self.blown * narrow).to(x.dtype) / self.blown


class Casting(nn.Module):
    def __init__(self, blown: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(blown) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Talking(nn.Module):
    """Averages over the ranks in its forward pass, as a SyncBatchNorm of one's own does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.net = nn.Linear(WIDTH, 4)
        if where == "group":
            dist.new_group([0, 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            mean = x.detach().mean(0)
            all_reduce(mean)
            x = x - mean / dist.get_world_size()
        return self.net(x)


class Expanded(nn.Module):
    """One number for many places of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)
        self.shift = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.shift


class Narrow(nn.Module):
    """An operation of its own that has no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("\"my_kernel\" not implemented for 'Double'")
        return self.net(x)


SHARED = SimpleNamespace(_experts_implementation="grouped_mm")
"""A configuration as transformers' models have one: all models that are built share it."""


class Experts(nn.Module):
    """Experts whose grouped product has no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.config = nn.Linear(WIDTH, 4), SHARED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64 and self.config._experts_implementation != "eager":
            raise RuntimeError("\"grouped_mm\" not implemented for 'Double'")
        return self.net(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "casting": Casting,
    "flips": lambda: Casting(30.0),
    "blown up": lambda: Casting(3e3),
    "talks in forward": lambda: Talking("forward"),
    "talks in loss": lambda: Talking("loss"),
    "makes a group": lambda: Talking("group"),
    "expanded": Expanded,
    "no float64": Narrow,
    "grouped experts": lambda: nn.Sequential(Experts()),
}


class Rows:
    draws_nothing = True

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.tensor(index % 4)


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Every rank's outputs against the mean of all ranks'."""
    mean = outputs.mean(0)
    dist.all_reduce(mean.detach())
    return (outputs - mean).square().sum(1)


def prove(world: World, model: str, layout: dict[str, int], bug: str = "") -> dict[str, Any]:
    """What the proof before a run says, its report, and how long it took."""
    torch.set_num_threads(1)
    began_s = time.monotonic()

    def trial(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        run = side.parallelize(
            MODELS[model],
            contrastive if model == "talks in loss" else None,
            batch=8,
            micro_batch=2,
            sample=lambda: torch.utils.data.default_collate([Rows()[k] for k in range(3)]),
        )
        loader = run.loader(Rows())
        while True:
            for batch in loader:
                yield "", run.step(batch)

    battery = Battery(trial, steps=2)
    battery = replace(battery, optimizers={SGD: battery.optimizers[SGD]})
    with BUGS[bug or "nothing"](world):
        report = battery.prove(world, layout)
    told = format_line(report) if report["verdict"] != "different" else ""
    return {"report": report, "line": told, "took_s": time.monotonic() - began_s}


def prove_grouped_experts(world: World) -> dict[str, Any]:
    """The same of grouped experts, and how their configuration says afterwards to compute them."""
    told = prove(world, "grouped experts", {"dp_replicate": 2})
    return {**told, "kind": SHARED._experts_implementation}


def flops_of_talking(world: World) -> int | None:
    """Counted by rank 0 alone, as at a run's first step."""
    if not world.is_first:
        return None
    rows = torch.randn(2, WIDTH)
    return count_training_flops(Talking("forward"), rows, lambda module, x: module(x).sum())
