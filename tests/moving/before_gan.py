"""A GAN learns a ring of eight points: two models in turns, each with its own optimizer."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS = 15 if "--short" in sys.argv else 50


def judged(logits: torch.Tensor, label: float) -> torch.Tensor:
    labels = torch.full_like(logits, label)
    return F.binary_cross_entropy_with_logits(logits, labels)


def net(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs)).to(ring.dtype)


torch.manual_seed(0)
angle = torch.randint(0, 8, (2048,)) * (2 * math.pi / 8)  # of points on a circle, scattered
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(2048, 2)
ring = ring.double() if DOUBLE else ring
maker, judge = net(8, 2), net(2, 1)
adams = [torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.9)) for one in (maker, judge)]
loader = torch.utils.data.DataLoader(ring, batch_size=128, shuffle=True)
for _epoch in range(EPOCHS):
    for real in loader:
        fakes = maker(torch.randn(len(real), 8).to(real))
        first = judged(judge(real), 0.9) + judged(judge(fakes.detach()), 0)
        adams[1].zero_grad()
        first.backward()
        adams[1].step()
        second = judged(judge(fakes), 1)
        adams[0].zero_grad()
        second.backward()
        adams[0].step()
with torch.no_grad():
    radius = maker(torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).to(ring))
radius = radius.norm(dim=1)
print(f"judge's loss {first.item()!r}, maker's loss {second.item()!r}")
print(f"radius of what it makes: {radius.mean():.2f} ± {radius.std():.2f} (real: 1 ± 0.02)")
