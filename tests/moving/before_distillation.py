"""A small net learns digits from a larger one's answers, and from the few labels that there are."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS, NO_LABEL = 2 if "--short" in sys.argv else 6, -100


def net(width: int) -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    return layers.double() if DOUBLE else layers


def labelled(targets: torch.Tensor) -> torch.Tensor:
    return (targets != NO_LABEL).sum()


images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = images / 16 if DOUBLE else (images / 16).float()
few = torch.where(torch.arange(len(classes)) % 10 == 0, classes, NO_LABEL)
data = torch.utils.data.TensorDataset(images[300:], few[300:])
torch.manual_seed(0)
teacher, student = net(256), net(32)
adam = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for _ in range(60):  # every process teaches the same teacher
    adam.zero_grad()
    F.cross_entropy(teacher(images[300:]), classes[300:]).backward()
    adam.step()
teacher.requires_grad_(False)
adam = torch.optim.AdamW(student.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        logits, taught = student(inputs), teacher(inputs)
        soft = F.kl_div(logits.log_softmax(1), taught.softmax(1), reduction="batchmean")
        hard = F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum")
        loss = soft + hard / labelled(targets).clamp_min(1)
        adam.zero_grad()
        loss.backward()
        adam.step()
right = (student(images[:300]).argmax(1) == classes[:300]).double().mean()
print(f"loss {loss.item()!r}, right {right:.1%} of images that nobody has shown it")
