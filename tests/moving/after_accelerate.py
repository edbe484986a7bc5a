"""Learn a linear map from noise-free samples."""

import torch
from torch import nn

import shoal

EPOCHS = 3


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_dataset():
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 16, generator=g)
    return torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 4, generator=g))


def main():
    dataset = make_dataset()
    model = Net()
    mse = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = shoal.parallelize(model, optimizer, shoal.mean_of_samples(mse), batch=64, clip=1)
    for epoch in range(EPOCHS):
        losses = []
        for loss in accelerator.steps(dataset):
            losses.append(loss.item())
        accelerator.print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
