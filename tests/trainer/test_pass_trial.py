"""A loop's own loss that mixes samples of a micro-batch, or carries their numbers along, is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.trainer.guards.pass_trial import PassTrial

Pass = Callable[[nn.Module, Tensor, Tensor], Tensor]


def lines_of(work: Pass, micro_batches: int = 3, rows: int = 2) -> list[str]:
    """Return the lines about passes in which a loop works on its micro-batches."""
    torch.manual_seed(0)
    net, found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), list[str]()
    trial = PassTrial(net, found.append, passes=4)
    for _ in range(micro_batches):
        x, y = (torch.randn(rows, 3, dtype=torch.float64) for _ in range(2))
        with trial.follow(x, y):
            loss = work(net, x, y)
            with trial.judge(loss):
                loss.backward()
    trial.close()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    return found


def advantages(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    gain = (y[:, 0] - y[:, 0].mean()) / (y[:, 0].std() + 1e-8)
    return -(net(x).log_softmax(-1)[:, 0] * gain).sum()


def logged_advantages(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As CleanRL: a fraction is read for a log before the backward pass."""
    float((y > 0).double().mean().item())
    return 0.5 * advantages(net, x, y)


def balanced(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    o = net(x)
    with torch.no_grad():
        shares = (o / 0.5).exp()
        for _ in range(3):
            shares = shares / shares.sum(0, keepdim=True)
            shares /= shares.sum(1, keepdim=True)
    return -(shares * o.log_softmax(-1)).sum()


def frequencies(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    label = (y[:, 0] > 0).long()
    weight = 1 / torch.bincount(label, minlength=3).clamp(min=1).to(x)
    return F.cross_entropy(net(x), label, weight=weight, reduction="sum")


def negatives(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    o = net(x)
    other = torch.cdist(o.detach(), o.detach()).argmax(1)
    return F.softplus(-(o - o[other].detach()).square().sum(-1)).sum()


def a_masked_mean(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).double()
    return ((net(x) - y).square() * mask).sum() / mask.sum() * len(x)


@pytest.mark.parametrize(
    "work", [advantages, logged_advantages, balanced, frequencies, negatives, a_masked_mean]
)
@pytest.mark.parametrize("rows", [2, 5])
def test_a_loss_with_a_statistic_of_the_micro_batch_is_named(work: Pass, rows: int) -> None:
    (line,) = lines_of(work, 6, rows)
    assert "depends on the others beside it" in line
    assert f"only the {rows} of a micro-batch" in line


def moving(kind: str) -> Pass:
    centre, queue, baseline = torch.zeros(3).double(), torch.randn(8, 3).double(), [torch.zeros(())]
    old = list[Tensor]()

    def work(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        if kind == "a centre":
            soft = (y - centre).softmax(-1)
            centre.mul_(0.5).add_(y.mean(0), alpha=0.5)
            return -(soft * o.log_softmax(-1)).sum()
        if kind == "a queue":
            total = (o @ queue.T.clone()).exp().sum()
            queue.copy_(torch.cat([o.detach(), queue])[:8])
            return total
        if kind == "a list":
            total = o.square().sum()
            for one in old:
                total = total + (o * one.mean(0)).sum()
            old.append(o.detach())
            return total
        total = (o[:, 0] * (y[:, 0] - baseline[0])).sum()
        baseline[0] = 0.9 * baseline[0] + 0.1 * y.mean()
        return total

    return work


@pytest.mark.parametrize("kind", ["a centre", "a queue", "a list", "a baseline"])
def test_a_tensor_that_goes_from_one_micro_batch_to_the_next_is_named(kind: str) -> None:
    (line,) = lines_of(moving(kind))
    assert "changes by the samples of each micro-batch" in line


def squares(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().sum()


def a_mean_times_its_rows(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x), y) * len(x) + F.l1_loss(net(x), y, reduction="sum")


def a_masked_mean_times_its_count(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    each = (net(x) - y).square()
    count = int(mask.sum())
    return each[mask].sum() / mask.sum() * count if count else 0.0 * each.sum()


def sums_for_a_log() -> Pass:
    right, seen = torch.zeros(()).double(), list[Tensor]()

    def work(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        right.add_((o.sign() == y.sign()).sum())
        seen.append(o.detach())
        seen[-1].mean().item()
        return squares(net, x, y) + 0.1 * o.abs().sum()

    return work


def chosen_rows(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        error = (net(x) - y).square().sum(1)
    keep = error > error.new_tensor(0.5)
    return (net(x[keep]) - y[keep]).square().sum() + 0.0 * net(x).sum()


def views(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    one, two = net(torch.cat([x, x + 0.1 * y])).chunk(2)
    return F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="sum")


def noise(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x + 0.1 * torch.randn_like(x)) - F.dropout(y)).square().sum()


def changed_in_place(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    o = net(x)
    y.mul_(0.5)
    o = o - y
    o[:, 0] *= 2.0
    return o.square().sum()


def by_teacher() -> Pass:
    teacher = nn.Linear(3, 3).double().requires_grad_(False)

    def work(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        return F.kl_div(net(x).log_softmax(-1), soft, reduction="sum")

    return work


def a_scratch_tensor() -> Pass:
    held = torch.zeros(2, 3).double()

    def work(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        held.copy_(x * 2)
        return (net(held) - y).square().sum()

    return work


class Doubled(torch.autograd.Function):
    """An operation of the loop's own, which no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def a_function_of_ones_own(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = Doubled.apply(net(x)) - y
    return each.square().sum() / y.abs().sum() * float(y.abs().sum())


def a_penalty_on_inputs(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    o = net(x)
    (slope,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    return (o - y).square().sum() + slope.square().sum()


@pytest.mark.parametrize(
    "work",
    [
        squares, a_mean_times_its_rows, a_masked_mean_times_its_count, sums_for_a_log(),
        chosen_rows, views, noise, changed_in_place, by_teacher(), a_scratch_tensor(),
        a_function_of_ones_own, a_penalty_on_inputs,
    ],
)  # fmt: skip
def test_a_sum_over_samples_prints_nothing(work: Pass) -> None:
    assert lines_of(work) == []


def test_numbers_of_a_pass_are_what_they_were() -> None:
    """Neither gradients nor random draws change."""

    def gradients(follow: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
        trial, (x, y) = PassTrial(net, lambda line: None, 4), torch.randn(2, 4, 3).double()
        for _ in range(2):
            if follow:
                with trial.follow(x, y):
                    noise(net, x, y).backward()
            else:
                noise(net, x, y).backward()
        return [p.grad for p in net.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


class Counted(TorchDispatchMode):
    """Mode that counts collectives."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def summed(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total = (y > 0).double().sum()
    torch.distributed.all_reduce(total)
    return (net(x) - y).square().sum() / total.detach()


def test_a_collective_of_the_loop_is_made_once() -> None:
    """Ranks with fewer samples repeat fewer functions: they would wait for one another."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with Counted() as counted:
            assert lines_of(summed, micro_batches=3) == []
    finally:
        torch.distributed.destroy_process_group()
    assert counted.calls == 3
