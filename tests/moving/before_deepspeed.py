"""Learn which of four directions a vector is nearest to."""

import os

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = 3
RANK = int(os.environ.get("RANK", "0"))
CONFIG = {
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


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
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=dataset, config=CONFIG
    )
    for epoch in range(EPOCHS):
        for step, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(engine.device), targets.to(engine.device)
            loss = loss_fn(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if step % 10 == 0 and RANK == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
