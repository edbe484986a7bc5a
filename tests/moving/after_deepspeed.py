"""Learn which of four directions a vector is nearest to."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

EPOCHS = 3
RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def make_dataset():
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 16, generator=g)
    return TensorDataset(inputs, (inputs @ torch.randn(16, 4, generator=g)).argmax(dim=1))


def main():
    dataset = make_dataset()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = shoal.parallelize(model, optimizer, layout="zero2", batch=64, clip=1.0)
    for epoch in range(EPOCHS):
        for step, loss in enumerate(run.steps(dataset)):
            if step % 10 == 0 and RANK == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
