"""Small models, data and runs that the trainer's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.fabric import start_world
from shoal.trainer.run import Run


def run_of(model: Any, optimizer: Any = None, loss: Any = None, *args: Any, **settings: Any) -> Run:
    """A run of one process; plain SGD with momentum unless told otherwise."""
    return shoal.parallelize(
        model, optimizer or sgd, loss or squares, *args, world=start_world({}), **settings
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Unreduced squared errors."""
    return (outputs - targets) ** 2


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def pair(samples: int = 8, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [samples, 4] and targets [samples, 2]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 4, generator=generator),
        torch.randn(samples, 2, generator=generator),
    )


class Rows:
    """A map-style dataset of `count` pairs."""

    def __init__(self, count: int = 22) -> None:
        self.inputs, self.targets = pair(count, seed=5)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Busy(nn.Module):
    """Dropout, BatchNorm, a tied, a frozen and an unused parameter in one small module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()),
                nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8, bias=False)),
            ]
        )
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.layers[1][1].weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(self.again(x)))


def busy() -> Busy:
    torch.manual_seed(11)
    return Busy()


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything in a module's state."""
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def cross_entropy_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)
