"""A backward pass that is not linear in the gradient of the outputs is named; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.trainer.guards.bent_gradients import find_bent_weight


class Passed(torch.autograd.Function):
    """The identity, whose backward pass applies a function to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.bend = bend
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.bend(gradients[0]), None


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, 6), nn.Linear(6, 2), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.between(self.one(x)))
        return out


def hooked(x: Tensor) -> Tensor:
    out = x.view_as(x)
    out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return out


BENT = {
    "clamp": lambda x: Passed.apply(x, lambda g: g.clamp(-0.1, 0.1)),
    "norm": lambda x: Passed.apply(x, lambda g: g / (g.norm(dim=1, keepdim=True) + 1e-9)),
    "sign": lambda x: Passed.apply(x, torch.sign),
    "grid": lambda x: Passed.apply(x, lambda g: (g * 64).round() / 64),
    "large dropped": lambda x: Passed.apply(x, lambda g: g * (g.abs() < 0.5)),
    "hook": hooked,
}
LINEAR = {
    "nothing": lambda x: x,
    "gelu": F.gelu,
    "relu": lambda x: x.relu(),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "attention": lambda x: (x @ x.T).softmax(1) @ x,
    "reversal": lambda x: Passed.apply(x, lambda g: -0.3 * g),
    "mask": lambda x: Passed.apply(x, lambda g: g * (torch.arange(6) > 2)),
    "straight through": lambda x: x + (x.round() - x).detach(),
    "detached": lambda x: x.detach(),
    "checkpoint": lambda x: checkpoint(F.gelu, x, use_reentrant=False),
    "drawn in backward": lambda x: Passed.apply(x, lambda g: g * (torch.rand_like(g) < 0.5)),
}


def named(between: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(0)
    net = Net(between).to(dtype)
    return find_bent_weight(net, net(torch.randn(4, 4, dtype=dtype)))


@pytest.mark.parametrize("kind", BENT)
def test_a_backward_pass_that_bends_gradients_is_named(kind: str) -> None:
    assert named(BENT[kind]) == named(BENT[kind], torch.float64) == "one.weight"


@pytest.mark.parametrize("kind", LINEAR)
def test_a_linear_backward_pass_is_not(kind: str) -> None:
    assert named(LINEAR[kind]) == named(LINEAR[kind], torch.float64) == ""


def test_layers_with_fused_backward_passes_are_not() -> None:
    torch.manual_seed(0)
    for net in (nn.LSTM(4, 6, 2), nn.GRU(4, 6), nn.TransformerEncoderLayer(4, 2, 8, 0.0)):
        assert find_bent_weight(net, net(torch.randn(4, 3, 4))) == ""


def test_gradients_stay_as_they_were() -> None:
    net = Net(F.gelu)
    find_bent_weight(net, net(torch.randn(4, 4)))
    assert all(p.grad is None for p in net.parameters())
