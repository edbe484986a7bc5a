"""Means that `run.backward` gets as sums are named; sums are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.trainer.guards._torch import SUMS
from shoal.trainer.guards.loss_terms import LossTermsCheck

LINES = ("× a mean", "divided by its elements", "weighs", "a mean over one micro-batch", "limited")
SOME = torch.tensor([0, 1, -100, 2, 1, -100])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])


def lines_of(loss: Callable[..., Any], sizes: tuple[int, ...] = (4, 2, 1)) -> list[str]:
    """Return the lines about micro-batches of these sizes."""
    found: list[str] = []
    check = LossTermsCheck(found.append, is_first=True, passes=6)
    for size in sizes:
        o = torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        total, count = loss(o, torch.ones(size, 3))
        check.check(total, count, 0)
    check.close()
    return found


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda o, y: (2 * F.mse_loss(o, y), len(o)), LINES[0]),
        (lambda o, y: (F.mse_loss(o, y) / 4, len(o)), LINES[0]),
        (lambda o, y: (-F.l1_loss(o, y) * 0.5, len(o)), LINES[0]),
        (lambda o, y: ((o - y).square().sum() + 0.1 * o.abs().mean(), len(o)), LINES[0]),
        (lambda o, y: (F.cross_entropy(o, y.argmax(1)) + o.square().mean(), len(o)), LINES[0]),
        (lambda o, y: (o.square().sum() / o.numel(), len(o)), LINES[1]),
        (lambda o, y: (o.square().sum(1).sum() / len(o), len(o)), LINES[1]),
        (lambda o, y: ((o[:, 0] * MASK[: len(o)]).sum() / MASK[: len(o)].sum(), 5), LINES[2]),
        (lambda o, y: (F.mse_loss(o, y), None), LINES[3]),
        (lambda o, y: (0.5 * F.mse_loss(o, y), None), LINES[2]),
        (lambda o, y: (F.mse_loss(o, y) / len(MASK), None), LINES[2]),
        (lambda o, y: (F.cross_entropy(o, SOME[: len(o)]) / len(MASK), None), LINES[2]),
        (lambda o, y: ((o - y).square().sum().clamp(max=3.0), len(o)), LINES[4]),
    ],
)
def test_a_mean_is_named(loss: Callable[..., Any], line: str) -> None:
    (found,) = lines_of(loss)
    assert line in found


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: (F.mse_loss(o, y, reduction="sum"), len(o)),
        lambda o, y: (2 * F.mse_loss(o, y, reduction="sum") / 7, len(o)),
        lambda o, y: (F.mse_loss(o, y) * len(o), len(o)),
        lambda o, y: (0.5 * (F.mse_loss(o, y) * o.numel()), len(o)),
        lambda o, y: (F.mse_loss(o, y) * o.numel(), o.numel()),
        lambda o, y: (F.cross_entropy(o, y.argmax(1)) * torch.tensor(len(o)), len(o)),
        lambda o, y: ((o - y).square().mean(1).sum(), len(o)),
        lambda o, y: ((o - y).square().sum() / o.shape[1], len(o)),
        lambda o, y: (o.square().sum() + 0.1 * (o.abs().sum() - o.sum()), len(o)),
        lambda o, y: (o.square().sum() / 40, None),
        lambda o, y: (F.mse_loss(o, y) * len(o) / 40, None),
        lambda o, y: (o.log_softmax(1)[:, 0].sum().exp(), len(o)),
        lambda o, y: (
            F.cross_entropy(o, SOME[: len(o)]) * (SOME[: len(o)] >= 0).sum(),
            (SOME[: len(o)] >= 0).sum(),
        ),
    ],
)
def test_a_sum_is_not_named(loss: Callable[..., Any]) -> None:
    assert lines_of(loss) == lines_of(loss, (2, 2, 2)) == lines_of(loss, (5, 1)) == []


@pytest.mark.parametrize(("factor", "ranks", "named"), [(2, 2, True), (1, 2, False), (2, 1, False)])
def test_a_mean_over_ranks_that_is_undone_is_named(factor: int, ranks: int, named: bool) -> None:
    """DDP takes a mean of gradients, so its loops multiply by the number of ranks."""
    found: list[str] = []
    check = LossTermsCheck(found.append, is_first=True, passes=6, ranks=ranks)
    o, rows = torch.ones(3, 3, requires_grad=True), torch.tensor(8.0)
    SUMS.append(rows)
    try:
        check.check(o.square().sum() * factor / rows, None, 0)
    finally:
        SUMS.clear()
    assert [("times the number of ranks" in line) for line in found] == [True] * named
