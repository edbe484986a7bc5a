"""A loop's own loss that compares samples, or a branch on its number, is named in the first step."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.trainer.guards.coupled_passes import CoupledPassesCheck, find_branch

BRANCHES = {
    "if loss.item() > 3:\n  loss = 0.1 * loss\nrun.backward(loss, n)": "loss",
    "value = loss.item()\nif value > 3:\n  loss *= 2\nrun.backward(loss, n)": "value",
    "value = float(loss)\nfactor = 1 if value < 3 else 2\nrun.backward(factor * loss, n)": "value",
    "if loss / n > 3:\n  loss = loss * 0\nrun.backward(loss, n)": "loss",
}
NONE = (
    "run.backward(loss, n)\ntotal += loss.item()",
    "if step % 10 == 0:\n  log(loss.item())\nrun.backward(loss, n)",
    "if not torch.isfinite(loss):\n  raise ValueError\nrun.backward(loss, n)",
    "value = loss.item()\nif math.isnan(value):\n  raise ValueError\nrun.backward(loss, n)",
    "if extra is not None:\n  loss = loss + extra\nrun.backward(loss, n)",
    "if epoch > 3:\n  loss = loss * 2\nrun.backward(loss, n)",
)


@pytest.mark.parametrize(("text", "name"), BRANCHES.items())
def test_a_branch_on_the_number_of_a_loss_is_found(text: str, name: str) -> None:
    assert find_branch(ast.parse(text)) == name


@pytest.mark.parametrize("text", NONE)
def test_other_branches_are_not(text: str) -> None:
    assert find_branch(ast.parse(text)) == ""


def lines_of(loss: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """Return the lines about a pass with a loss of one's own."""
    torch.manual_seed(0)
    net, found = nn.Linear(3, 3), list[str]()
    check = CoupledPassesCheck(net, found.append, passes=4)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    check.reset_outputs()
    total = loss(net(x), y)
    check.check(total, y, None)
    total.backward()
    check.close()
    assert not net._forward_hooks
    return found


COUPLED = {
    "root of a mean": lambda o, y: F.mse_loss(o, y).sqrt() * 4,
    "ratio": lambda o, y: (o.sigmoid() * y).sum() / o.sigmoid().sum(),
    "contrast": lambda o, y: F.cross_entropy(o @ o.T, torch.arange(4), reduction="sum"),
    "standardised": lambda o, y: ((o - o.mean(0)) / o.std(0) - y).square().sum(),
    "negatives out of the targets": lambda o, y: F.cross_entropy(
        o @ y.T, torch.arange(4), reduction="sum"
    ),
    "log of a sum": lambda o, y: (o - y).square().sum().log(),
}
ADDED: dict[str, Any] = {
    "squares": lambda o, y: (o - y).square().sum(),
    "classes": lambda o, y: F.cross_entropy(o, y.argmax(1), reduction="sum"),
    "with a constant of the batch": lambda o, y: ((o - y.mean(0)) ** 2).sum(),
    "cosines": lambda o, y: -F.cosine_similarity(o, y).sum(),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_a_loss_that_compares_samples_is_named(kind: str) -> None:
    (line,) = lines_of(COUPLED[kind])
    assert "depends on the others beside it" in line


@pytest.mark.parametrize("kind", ADDED)
def test_a_sum_over_samples_is_not(kind: str) -> None:
    assert lines_of(ADDED[kind]) == []


def test_a_gradient_penalty_is_left_alone() -> None:
    """Its graph has the node of the loss's own backward pass, which saves no scores."""

    def penalized(outputs: Tensor, _: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, torch.zeros(4, dtype=torch.long), reduction="sum")
        (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
        return loss + slope.square().sum()

    assert lines_of(penalized) == []


def test_a_loss_through_another_network_is_left_alone() -> None:
    """Its backward pass may need other ranks."""
    judge = nn.Linear(3, 1)
    assert lines_of(lambda o, y: judge(o).sum().square()) == []


def test_a_clamp_on_outputs_is_named() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        o.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return (o - y).square().sum()

    (line,) = lines_of(loss)
    assert "outputs of the model have a hook" in line


def test_a_schedule_that_counts_micro_batches_is_named_once() -> None:
    net, found = nn.Linear(3, 3), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    check = CoupledPassesCheck(net, found.append, 4, optimizer.param_groups)
    check.reset_outputs()
    assert found == []
    for _ in range(2):
        optimizer.param_groups[0]["lr"] *= 0.5
        check.reset_outputs()
    check.close()
    assert len(found) == 1
    assert "lr changed inside of the loop" in found[0]
