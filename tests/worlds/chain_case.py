"""A chain of many small blocks: what is said of it at the start."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from shoal.fabric import World
from shoal.trainer.parallelize import parallelize


class Block(nn.Module):
    """272 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def said(world: World, layout: Any, blocks: int) -> list[str]:
    """Lines for the user of a run that was built and not stepped; rank 0 says them."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    run = parallelize(
        nn.Sequential(*(Block() for _ in range(blocks))),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda outputs, targets: (outputs - targets).square().sum(1),
        layout=layout,
        batch=2 * world.size,
        sample=(torch.zeros(2, 16), torch.zeros(2, 16)),
        world=world,
    )
    logging.getLogger("shoal").removeHandler(handler)
    for undo in run.program.on_close:
        undo()
    return heard
