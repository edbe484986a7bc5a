"""Losses that compare samples with each other are told from those that add samples up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.trainer.guards.first_step_checks import FirstStepLoss, count_compared_samples

Tensor = torch.Tensor
B, T, C = 6, 5, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


CLASSES = torch.arange(B) % C
TOKENS = (torch.arange(B * T) % C).reshape(B, T)


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs by time first, and as many places as samples."""
    found = F.log_softmax(outputs, -1)
    return F.ctc_loss(found, targets, (B,) * B, (T,) * B, blank=0, reduction="sum")


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, torch.tensor(targets.numel())


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    chance = F.softmax(outputs, -1).gather(1, targets[:, None])
    return -((1 - chance) ** 2) * chance.log()


ADDED = {
    "classes": (lambda o, t: F.cross_entropy(o, t, reduction="none"), drawn(B, C), CLASSES),
    "mean of classes": (F.cross_entropy, drawn(B, C), CLASSES),
    "smoothed": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), drawn(B, C), CLASSES),
    "ignored": (lambda o, t: F.cross_entropy(o, t, ignore_index=0), drawn(B, C), CLASSES),
    "focal": (focal, drawn(B, C), CLASSES),
    "tokens": (counted, drawn(B, T, C), TOKENS),
    "squares": (F.mse_loss, drawn(B, C), drawn(B, C) * 2),
    "huber": (F.huber_loss, drawn(B, C) * 3, drawn(B, C)),
    "absolute": (F.l1_loss, drawn(B, C), drawn(B, C) * 2),
    "two classes": (F.binary_cross_entropy_with_logits, drawn(B, C), torch.ones(B, C)),
    "divergence": (lambda o, t: F.kl_div(F.log_softmax(o, 1), t.softmax(1), reduction="sum"), drawn(B, C),
                   drawn(B, C)),
    "likeness": (lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(B)), drawn(B, C),
                 drawn(B, C) * 2),
    "pictures": (lambda o, t: (o - t).abs().pow(1.5).sum(), drawn(B, 3, 4, 4), drawn(B, 3, 4, 4) * 2),
    "time first": (ctc, drawn(B, B, C + 3), TOKENS + 1),
    "in float16": (lambda o, t: F.cross_entropy(o.half(), t), drawn(B, C), CLASSES),
}  # fmt: skip


def negatives(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ targets.T, torch.arange(B), reduction="none")


def two_ways(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    one, other = (F.normalize(each, dim=1) for each in outputs)
    return F.cross_entropy(one @ other.T, targets) + F.cross_entropy(other @ one.T, targets)


def triplets(outputs: Tensor, targets: Tensor) -> Tensor:
    far = (outputs[:, None] - outputs).square().sum(-1)  # torch.cdist has no second derivative
    same = targets[:, None] == targets[None]
    return F.relu((far * same).max(1).values - far.masked_fill(same, 9.0).min(1).values + 5).sum()


def variance(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return ((outputs - targets) ** 2).sum() + F.relu(1 - outputs.std(0)).sum(), B


COMPARED = {
    "negatives": (lambda o, t: negatives(o, o.roll(1, 1)), drawn(B, C), CLASSES),
    "two ways": (two_ways, (drawn(B, C), drawn(B, C) * 2), torch.arange(B)),
    "triplets": (triplets, drawn(B, C), CLASSES % 2),
    "variance": (variance, drawn(B, C) / 3, drawn(B, C)),
    "norm of the batch": (lambda o, t: (o / o.norm() - t).square().sum(), drawn(B, C),
                          drawn(B, C)),
}  # fmt: skip


def asked(loss: Callable[..., object], outputs: object, targets: Tensor) -> int:
    leaves = outputs if isinstance(outputs, tuple) else (outputs,)
    held = tuple(leaf.clone().requires_grad_() * 1 for leaf in leaves)
    given = held if isinstance(outputs, tuple) else held[0]
    result = loss(given, targets)
    found = count_compared_samples(result, given, targets)
    total = result[0] if isinstance(result, tuple) else result
    total.sum().backward()  # the graph is still there for the run's own backward pass
    return found


@pytest.mark.parametrize("name", ADDED)
def test_losses_that_add_samples_up_are_left_alone(name: str) -> None:
    assert asked(*ADDED[name]) == 0


@pytest.mark.parametrize("name", COMPARED)
def test_losses_that_compare_samples_are_seen(name: str) -> None:
    assert asked(*COMPARED[name]) == B


def test_hooks_of_outputs_run_once_in_the_first_step() -> None:
    """Under fsdp such a hook gathers all weights, and the pass it began reduces all gradients."""
    program = SimpleNamespace(
        module=nn.Linear(C, C),
        world=SimpleNamespace(size=1),
        data=SimpleNamespace(size=2),
        plan=Plan(Layout(dp_shard=2, zero=3)),
        cuts={},
    )
    seen: list[Tensor] = []
    outputs = drawn(B, C).requires_grad_() * 1
    outputs.register_hook(seen.append)
    first = FirstStepLoss(
        lambda o, t: negatives(o, o.roll(1, 1)), cast(Any, program), [(0, (outputs, CLASSES))]
    )
    first(outputs, CLASSES).sum().backward()
    assert first.together == B
    assert len(seen) == 1
