"""Two runs in one process: a GAN computes what a loop written by hand in plain PyTorch computes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from trainer_small import bits, run_of


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


def discriminator() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.999))


def judged(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    angle = 6.28 * torch.rand(8, generator=source, dtype=torch.float64)
    noise = torch.randn(8, 3, generator=source, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], 1), noise


STEPS = 6
ONES, ZEROS = (torch.full((8, 1), float(v), dtype=torch.float64) for v in (1, 0))


def test_a_gan_equals_a_plain_loop() -> None:
    """The generator's backward also deposits gradients in the discriminator's parameters."""
    make, judge = generator(), discriminator()
    runs = {"batch": 16, "micro_batch": 4, "precision": "fp64"}
    judging = run_of(judge, adam, judged, **runs)
    half = {**runs, "batch": 8}
    making = run_of(make, adam, lambda fakes, labels: judged(judge(fakes), labels), **half)
    told = []
    for step in range(STEPS):
        real, noise = data(step)
        with torch.no_grad():
            fakes = make(noise)
        first = judging.step((torch.cat([real, fakes]), torch.cat([ONES, ZEROS])))
        assert judge[0].weight.grad is not None
        second = making.step((noise, ONES))
        told.append((first.loss, second.loss))

    plain_make, plain_judge = generator().double(), discriminator().double()
    make_steps, judge_steps = adam(plain_make.parameters()), adam(plain_judge.parameters())
    for step in range(STEPS):
        real, noise = data(step)
        with torch.no_grad():
            fakes = plain_make(noise)
        judge_steps.zero_grad()
        outputs = plain_judge(torch.cat([real, fakes]))
        first_loss = judged(outputs, torch.cat([ONES, ZEROS])).mean()
        first_loss.backward()
        judge_steps.step()
        make_steps.zero_grad()
        second_loss = judged(plain_judge(plain_make(noise)), ONES).mean()
        second_loss.backward()
        make_steps.step()
        assert abs(told[step][0] - first_loss.item()) < 1e-12
        assert abs(told[step][1] - second_loss.item()) < 1e-12
    for ours, theirs in ((make, plain_make), (judge, plain_judge)):
        for name, tensor in bits(ours).items():
            assert torch.allclose(tensor, theirs.state_dict()[name], rtol=0, atol=1e-12), name


def test_a_frozen_judge_while_the_generator_steps() -> None:
    """Scripts switch requires_grad of the discriminator off and on; both runs must bear it."""
    make, judge = generator(), discriminator()
    judging = run_of(judge, adam, judged, precision="fp64")
    making = run_of(
        make, adam, lambda fakes, labels: judged(judge(fakes), labels), precision="fp64"
    )
    for step in range(2):
        real, noise = data(step)
        judging.step((real, ONES))
        judge.requires_grad_(False)
        before = bits(judge)
        making.step((noise, ONES))
        for name, tensor in bits(judge).items():
            assert torch.equal(tensor, before[name])
        judge.requires_grad_(True)
    judging.close()
    making.step((data(9)[1], ONES))
    making.close()
