"""Layers that know their own number are alike where their graphs are, each traced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.trace.graph import layer_groups
from shoal.trace.graph.layer_groups import LayerGrouping
from shoal.trace.isolation.layer_calls import LayerCall


class Numbered(nn.Module):
    """Multiplies by its number where there is one row, else by two."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, plain: bool = True) -> torch.Tensor:
        return self.weight * x * (self.number if x.shape[0] == 1 or not plain else 2)


def grouped(numbers: list[int], calls: list[LayerCall]) -> list[list[str]]:
    layers = nn.ModuleList(Numbered(number) for number in numbers)
    names = [str(k) for k in range(len(layers))]
    return LayerGrouping(layers).group_layers(names, dict(zip(names, calls, strict=True)))


def call(rows: int, **named: Any) -> LayerCall:
    return LayerCall((torch.randn(rows, 4),), named, ())


def test_each_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first of them beside every other one: 63 traces for 32 layers."""
    traced: list[Any] = []
    trace = layer_groups.trace_layer
    monkeypatch.setattr(
        layer_groups, "trace_layer", lambda *given: traced.append(given) or trace(*given)
    )
    assert grouped([3, 5, 6, 7], [call(2) for _ in range(4)]) == [["0", "1", "2", "3"]]
    assert len(traced) == 4


@pytest.mark.parametrize("last", [call(1), call(2, plain=False)], ids=["shape", "flag"])
def test_what_a_graph_was_traced_for_tells_graphs_apart(last: LayerCall) -> None:
    """The third's is the first's text for another kind of input."""
    plain = {"plain": True} if last.kwargs else {}
    assert grouped([3, 5, 2], [call(2, **plain), call(2, **plain), last]) == [["0", "1"], ["2"]]
