"""A mean over a mask that is full on some ranks: the first step's trial finds it on the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoal
from guards import Lines
from sample_lists_case import drawn
from shoal.fabric import World

BOUNDS = [(0, 5), (5, 8)]


def masked_mean(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    y, mask = targets
    return ((outputs - y).square() * mask).sum() / mask.sum()


def batch_of(rank: int, step: int, masked: list[int]) -> Any:
    x, y = drawn(step, 8, 6), drawn(step + 50, 8, 4)
    mask = (drawn(step + 90, 8, 4) > 0).double()
    if rank not in masked:
        mask = torch.ones_like(mask)
    rows = slice(*BOUNDS[rank])
    return x[rows], (y[rows], mask[rows])


def trained(world: World, layout: str, masked: list[int], steps: int = 3) -> dict[str, Any]:
    """Train some steps; the masks of some ranks have zeros.

    Returns:
        Lines of this rank, and its numbers of collectives in each step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Lines() as heard:
        run = shoal.parallelize(
            net, optimizer, shoal.mean_of_samples(masked_mean), layout, world=world, micro_batch=2,
            precision="fp64",
        )  # fmt: skip
        for step in range(steps):
            run.step(batch_of(world.rank, step, masked))
    run.guards.close()
    for undo in run.program.on_close:
        undo()
    return {"lines": [line for line in heard.lines if "loss: " in line]}


class Centred(nn.Module):
    """A layer over inputs minus a buffer that the loop moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x - self.mean)
        return out


def moved(world: World, layout: str, *, alike: bool) -> list[str]:
    """Train three steps; the loop moves a buffer by this rank's samples, or by those of all.

    Returns:
        Lines of this rank about the buffer.
    """
    torch.manual_seed(0)
    net = Centred().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Lines() as heard:
        run = shoal.parallelize(
            net, optimizer, lambda o, y: ((o - y).square().sum(), len(y)), layout, world=world,
            precision="fp64",
        )  # fmt: skip
        for step in range(3):
            x, y = drawn(step, 8, 6), drawn(step + 50, 8, 4)
            rows = slice(*BOUNDS[world.rank])
            run.model.mean.lerp_((x if alike else x[rows]).mean(0), 0.1)
            run.step((x[rows], y[rows]))
    run.guards.close()
    for undo in run.program.on_close:
        undo()
    return [line for line in heard.lines if "buffer" in line]


def tuned(world: World, layout: str, *, alike: bool) -> list[str]:
    """Train three steps; the loop moves a weight of the loss by this rank's samples, or by all.

    Returns:
        Lines of this rank about the loss.
    """
    torch.manual_seed(0)
    net, factor = Centred().double(), torch.ones((), dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Lines() as heard:
        run = shoal.parallelize(
            net, optimizer, lambda o, y: ((o - y).square().sum() * factor, len(y)), layout,
            world=world, precision="fp64",
        )  # fmt: skip
        for step in range(3):
            x, y = drawn(step, 8, 6), drawn(step + 50, 8, 4)
            rows = slice(*BOUNDS[world.rank])
            run.step((x[rows], y[rows]))
            factor.mul_(1 + 0.1 * (y if alike else y[rows]).mean())
    run.guards.close()
    for undo in run.program.on_close:
        undo()
    return [line for line in heard.lines if "loss: factor" in line]
