"""A GAN learns a ring of eight points: two models in turns, each a run with its own optimizer.

Shows: the maker's loss goes through the judge, whose run does not notice; noise drawn in a loop
over micro-batches is that of one process on any number; two runs that go on from one moment.
Start: python examples/gan.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/gan.py [FOLDER]
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import shoal

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS = 15 if "--short" in sys.argv else 50
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/gan")


def judged(logits: torch.Tensor, label: float) -> torch.Tensor:
    labels = torch.full_like(logits, label)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def net(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs)).to(ring.dtype)


torch.manual_seed(0)
angle = torch.randint(0, 8, (2048,)) * (2 * math.pi / 8)  # of points on a circle, scattered
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(2048, 2)
ring = ring.double() if DOUBLE else ring
maker, judge = net(8, 2), net(2, 1)
adams = [torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.9)) for one in (maker, judge)]
making = shoal.parallelize(maker, adams[0], batch=128, folder=f"{folder}/maker")
judging = shoal.parallelize(judge, adams[1], batch=128, folder=f"{folder}/judge")
if making.restore():  # it is saved last: the judge's checkpoint of that step is there
    judging.restore(step=making.step_count)
for _epoch in making.epochs(EPOCHS):
    for batch in making.loader(ring):
        for micro in judging.micro_batches(batch):
            fakes = maker(torch.randn(len(micro.inputs), 8).to(ring)).detach()
            judging.backward(judged(judge(micro.inputs), 0.9) + judged(judge(fakes), 0), len(fakes))
        first = judging.update()
        for micro in making.micro_batches(batch):
            fakes = maker(torch.randn(len(micro.inputs), 8).to(ring))
            making.backward(judged(judge(fakes), 1), len(fakes))
        second = making.update()
    judging.save()
    making.save()
radius = making.predict(torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).to(ring))
radius = radius.norm(dim=1)
making.print(f"judge's loss {first.loss!r}, maker's loss {second.loss!r}")
making.print(f"radius of what it makes: {radius.mean():.2f} ± {radius.std():.2f} (real: 1 ± 0.02)")
making.close()
judging.close()
