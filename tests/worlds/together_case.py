"""Many small blocks under fsdp, beside one process: in order, skipped, swapped, called twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.fabric import World, start_world
from shoal.fabric.collectives.traffic_counts import ALL_GATHER, REDUCE_SCATTER
from shoal.trainer.parallelize import parallelize
from shoal.trainer.step.call_contract import mean_of_samples

BLOCKS, WIDTH, STEPS = 40, 8, 4


class Block(nn.Module):
    """272 weights or so, dropout, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((WIDTH,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(torch.tanh(self.inner(self.norm(x))))


class Chain(nn.Module):
    """Calls its blocks as `habit` says, which hangs on the step alone."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head, self.habit, self.at = nn.Linear(WIDTH, 3), habit, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = list(self.blocks)
        if self.habit == "skipped":
            order = [block for n, block in enumerate(order) if n % 3 != self.at % 3]
        if self.habit == "swapped" and self.at % 2:
            order.reverse()
        if self.habit == "twice":
            order += order[:5]
        for block in order:
            x = block(x)
        return self.head(x)


def trained(world: World, layout: str, habit: str, **policies: Any) -> dict[str, Any]:
    """Losses, norms, weights after some steps, and the collectives of the last one."""
    torch.manual_seed(7)
    model = Chain(habit).double()
    run = parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2),
        mean_of_samples(nn.CrossEntropyLoss()), layout, batch=8, micro_batch=4,
        precision="fp64", clip=1.0, world=start_world(), **policies,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, 8, WIDTH, generator=drawn, dtype=torch.float64)
    y = torch.randint(0, 3, (STEPS, 8), generator=drawn)
    losses, norms = [], []
    sent: list[str] = []
    count = run.world.traffic.count
    for step in range(STEPS):
        model.at = step
        sent.clear()
        run.world.traffic.count = lambda what, *rest: (sent.append(what), count(what, *rest))[1]
        rank, ranks = run.world.rank, run.world.size
        own = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
        result = run.step((x[step, own], y[step, own]))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    del run.world.traffic.count
    run.close()
    return {
        "losses": losses,
        "norms": norms,
        "gathers": sent.count(ALL_GATHER),
        "scatters": sent.count(REDUCE_SCATTER),
    }
