"""Model, data and loops of the app: Flower's PyTorch quickstart in shape, on scikit-learn's digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(16 * 3 * 3, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(nn.functional.pad(x, (2, 2, 2, 2)))))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def load_data(partition: int, partitions: int, batch_size: int) -> DataLoader:
    """Return a loader of one client's images; its order is drawn from the partition's number."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[partition::partitions] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = TensorDataset(x, torch.tensor(labels[partition::partitions]))
    order = torch.Generator().manual_seed(partition)
    return DataLoader(data, batch_size=batch_size, shuffle=True, generator=order)


def train(net: nn.Module, trainloader: DataLoader, epochs: int, lr: float, device: object) -> float:
    """Train on one process, as the quickstart does; return the mean loss of the steps."""
    net.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total, steps = 0.0, 0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps
