"""Equal layers compute once where only shapes matter, and what that shows is what all would show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from user_modules import EXAMPLES, made

from shoal.base.errors import PlanError
from shoal.parallel.spmd import model_split
from shoal.trace.flow import forward_record
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.memoized_forward import memoize_layers, run_memoized

CALLS: list[Any] = []


class Layer(nn.Module):
    """Counts its calls; `how` is what makes it a layer that must compute."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor, seen: Any = None) -> Any:
        CALLS.append(self)
        if self.how == "aside":
            self.last = x
        if self.how == "in place":
            return x.add_(1)
        out = x + self.inner(x)
        if self.how == "weight":
            return out, self.inner[0].weight
        return out


class Stack(nn.Module):
    def __init__(self, how: str = "", argument: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(how) for _ in range(4))
        self.argument = argument

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x, self.argument)
            x = out[0] if isinstance(out, tuple) else out
        return x


class NoLog:
    """Log without listeners inside of layers."""

    def __len__(self) -> int:
        return 0

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Record nothing."""


def passed(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    CALLS.clear()
    with memoize_layers(model, NoLog()):
        out = model(x)
    assert all("forward" not in vars(part) for part in model.modules())
    return len(CALLS), out


def test_one_of_equal_layers_computes() -> None:
    calls, out = passed(Stack(), torch.ones(2, 4, requires_grad=True))
    assert calls == 1
    assert out.shape == (2, 4)
    assert out.requires_grad
    assert not out.is_leaf  # code behind it may write into it
    assert passed(Stack(), torch.ones(2, 4))[0] == 2  # only the first one's input takes no gradient


@pytest.mark.parametrize("how", ["aside", "weight"])
def test_layers_that_do_more_than_give_a_result_compute(how: str) -> None:
    assert passed(Stack(how), torch.ones(2, 4))[0] == 4


def test_layers_that_are_handed_a_cache_compute() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    assert passed(Stack(argument={"cache": object()}), x)[0] == 4
    assert passed(Stack(argument={"flag": True}), x)[0] == 1


def test_layers_that_differ_in_an_attribute_compute() -> None:
    model = Stack()
    for number, layer in enumerate(model.layers):
        layer.number = number
    assert passed(model, torch.ones(2, 4))[0] == 4


def test_what_is_handed_on_is_the_same_object() -> None:
    x = torch.ones(2, 4)
    calls, out = passed(Stack("in place"), x)
    assert calls == 1
    assert out is x


def test_a_layer_called_again_computes() -> None:
    model = Stack()
    model.layers = nn.ModuleList([model.layers[0]] * 3 + [model.layers[1]])
    assert passed(model, torch.ones(2, 4))[0] == 3


def test_an_input_of_another_kind_is_computed() -> None:
    model = Stack()
    with memoize_layers(model, NoLog()):
        CALLS.clear()
        for rows in (2, 3, 2):
            model.layers[0](torch.ones(rows, 4))
            model.layers[1](torch.ones(rows, 4))
    assert len(CALLS) == 3  # the third time layer 0 is called again


def test_a_model_that_cannot_live_with_echoes_is_run_as_it_is() -> None:
    seen = []

    def look(cheaply: bool) -> str:
        seen.append(cheaply)
        if cheaply:
            raise KeyError("what a layer would have left")
        return "found"

    assert run_memoized(look) == "found"
    assert seen == [True, False]


def found(name: str) -> Any:
    """Everything that a look at a model tells of it."""
    module = made(EXAMPLES[name].build)
    inputs = EXAMPLES[name].inputs(3)
    run = lambda m: EXAMPLES[name].call(m, inputs)  # noqa: E731
    seen = ForwardRecord(module, run).trunk
    told: Any
    try:
        split = model_split.plan_split(ForwardRecord(module, run), 2, sequence=True)
        told = split.parameters, split.exchanges, split.notices, split.tables.split
    except PlanError as refusal:
        told = str(refusal)
    return seen.blocks, seen.called, seen.leaf, seen.calls, told


@pytest.mark.parametrize("name", ["nested", "unet", "tuples", "encoder"])
def test_echoes_change_nothing_that_is_found(name: str, monkeypatch: Any) -> None:
    with_echoes = found(name)
    monkeypatch.setattr(forward_record, "run_memoized", lambda look: look(False))
    assert found(name) == with_echoes
