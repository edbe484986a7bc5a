"""Any nn.Module, in a loop of your own, with dict batches, a weighted loss, save and restore.

Start: python examples/own_loop.py runs/own     (again: it goes on, also on other processes)
   or: python -m torch.distributed.run --nproc-per-node 2 examples/own_loop.py runs/own
"""

import sys

import torch
from torch import nn

import shoal

STEPS = 150


class Waves:
    """Samples of y = sin(3x) with noise; every second one counts twice."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / 300 - 1])
        noise = 0.05 * torch.randn(1)  # drawn from (seed, epoch, index), whichever rank reads it
        return {"x": x, "y": torch.sin(3 * x) + noise, "weight": torch.tensor(1.0 + index % 2)}


class Net(nn.Sequential):
    """A module that reads the whole dict."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Outputs [samples, 1]."""
        return super().forward(batch["x"])


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple:
    """(sum, count): no mean, so that ranks and micro-batches of unequal weight add up right."""
    squares = batch["weight"] * (outputs - batch["y"]).squeeze(-1) ** 2
    return squares.sum(), batch["weight"].sum()


torch.manual_seed(0)
model = Net(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.01), nn.Linear(64, 1))
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
run = shoal.parallelize(model, optimizer, loss, batch=48, micro_batch=8, clip=1.0, folder=folder)
if run.restore() and run.world.is_first:
    print(f"goes on from step {run.step_count}")
loader, goal = run.loader(Waves()), run.step_count + STEPS
while run.step_count < goal:
    for batch in loader:  # one epoch of 13 steps; STEPS ends in the middle of one
        result = run.step(batch)
        if run.step_count == goal:
            break
run.save()
if run.world.is_first:
    print(f"step {result.step}: loss {result.loss:.4f}, {result.targets} counted")
run.close()
