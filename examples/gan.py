"""A GAN learns a ring of eight points: two runs in one process, each with its own optimizer.

Shows: two models that train in turns; the generator's loss goes through the discriminator, and each
run clips, skips and sums over ranks by itself.
Start: python examples/gan.py
   or: python -m torch.distributed.run --nproc-per-node 2 examples/gan.py
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import shoal

STEPS, SAMPLES = 800, 128


def real(count: int) -> torch.Tensor:
    """Points on a circle of radius 1, at eight places, slightly scattered: [count, 2]."""
    angle = torch.randint(0, 8, (count,)) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(count, 2)


def judged(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Unreduced values, one per point."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def adam(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.5, 0.9))


def net(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


torch.manual_seed(0)  # every rank builds the same models
maker, judge = net(8, 2), net(2, 1)
judging = shoal.parallelize(judge, adam, judged)
making = shoal.parallelize(maker, adam, lambda fakes, labels: judged(judge(fakes), labels))

torch.manual_seed(judging.world.rank)  # and draws its own share of the samples
share = SAMPLES // judging.world.size
ones, zeros = torch.ones(share, 1), torch.zeros(share, 1)
for _ in range(STEPS):
    with torch.no_grad():
        fakes = maker(torch.randn(share, 8))
    first = judging.step((torch.cat([real(share), fakes]), torch.cat([0.9 * ones, zeros])))
    second = making.step((torch.randn(share, 8), ones))

with torch.no_grad():
    radius = maker(torch.randn(1000, 8)).norm(dim=1)
if judging.world.is_first:
    print(f"judge's loss {first.loss:.3f}, maker's loss {second.loss:.3f}")
    print(f"radius of what it makes: {radius.mean():.2f} ± {radius.std():.2f} (real: 1.00 ± 0.02)")
making.close()
judging.close()
