"""Learn a linear map from noise-free samples."""

import torch
from accelerate import Accelerator
from torch import nn

EPOCHS = 3


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def make_dataset():
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 16, generator=g)
    return torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 4, generator=g))


def main():
    accelerator = Accelerator()
    dataset = make_dataset()
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
    model = Net()
    mse = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        accelerator.print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
