"""Values that a recorded layer read are named once a script changes them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shoal.trainer.guards.traced_values import TracedValuesGuard

WARM = {"factor": 1.0}
DEPTH = 2


class Layer(nn.Module):
    scale = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.one, self.act, self.rate, self.config = nn.Linear(3, 3), nn.GELU(), 0.1, config

    def forward(self, x: Tensor) -> Tensor:
        return WARM["factor"] * DEPTH * self.scale * self.act(self.one(x))


def made(*more: nn.Module, stages: int = 1) -> tuple[nn.Sequential, TracedValuesGuard, list[str]]:
    """Return a model of two layers, its guard after a step, and the lines."""
    config = types.SimpleNamespace(width=3, factor=1.0)
    net, lines = nn.Sequential(Layer(config), Layer(config), *more), list[str]()
    layout = types.SimpleNamespace(text=lambda: "tp (tp = 2)")
    program = types.SimpleNamespace(
        module=net,
        plan=types.SimpleNamespace(layout=layout),
        pipe=types.SimpleNamespace(size=stages),
    )
    guard = TracedValuesGuard(cast("Any", program), lines.append)
    guard.before(1, None)
    return net, guard, lines


def set_rate(net: nn.Sequential) -> None:
    net[1].rate = 0.2


def set_tensor(net: nn.Sequential) -> None:
    net[1].rate = torch.ones(3)


def set_scale(net: nn.Sequential) -> None:
    net[0].scale = 0.5


def set_factor(net: nn.Sequential) -> None:
    net[0].config.factor = 0.5


def replace_activation(net: nn.Sequential) -> None:
    net[1].act = nn.Tanh()


def patch_forward(net: nn.Sequential) -> None:
    net[0].forward = types.MethodType(lambda self, x: x, net[0])


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "1.rate": set_rate,
    "0.scale": set_scale,
    "0.config.factor": set_factor,
    "1.act": replace_activation,
    "0.forward": patch_forward,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_named_once(name: str) -> None:
    net, guard, lines = made()
    guard.before(2, None)
    assert lines == []
    CHANGES[name](net)
    guard.before(3, None)
    guard.before(4, None)
    (line,) = lines
    assert f"model: {name} was changed since shoal.parallelize" in line
    assert "under tp (tp = 2) layers run as graphs" in line


def test_a_tensor_in_the_place_of_a_number_is_named() -> None:
    net, guard, lines = made()
    set_tensor(net)
    guard.before(2, None)
    assert "1.rate was changed" in lines[0]


@pytest.mark.parametrize(("name", "value"), [("WARM", {"factor": 0.5}), ("DEPTH", 3)])
def test_a_changed_global_is_named(monkeypatch, name: str, value: Any) -> None:
    _, guard, lines = made()
    monkeypatch.setitem(globals(), name, value)
    guard.before(2, None)
    assert f"the global {name} was changed" in lines[0]


def test_what_stays_or_changes_with_the_mode_is_not_named() -> None:
    net, guard, lines = made()
    net.eval()
    net[0].rate = 0.1 * 1.0
    net[1].seen = 5
    net(torch.randn(2, 3))
    guard.before(2, None)
    assert lines == []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


@pytest.mark.parametrize("stages", [1, 2])
def test_what_the_forward_pass_changes_is_not_named(stages: int) -> None:
    """`hidden_state.py` names it, once; a graph that reads it is recorded anew."""
    net, guard, lines = made(Counting(), stages=stages)
    around = guard.around(1, 2)
    assert around is not None
    with around:
        net(torch.randn(2, 3))
    guard.before(2, None)
    assert lines == []
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    set_rate(net)
    guard.before(3, None)
    assert len(lines) == 1


def test_what_a_loop_changes_beside_the_forward_pass_is_named() -> None:
    net, guard, lines = made()
    around = guard.around(1, 2)
    assert around is not None
    with around:
        net(torch.randn(2, 3))
        set_rate(net)
        net(torch.randn(2, 3))
    guard.before(2, None)
    assert len(lines) == 1
