"""Stands in the place of a layer of experts of which this rank holds a part.

The layer's own forward computes its own experts on the rows that come here, with weight 1 each; all
else (routing before, weighting after) happens at the tokens' home, see token_routing.py. Where no
row comes the layer runs on one row that nobody sent, of which nothing is kept: so its parameters
have gradients of zeros and its results the right format, and every rank joins every exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fabric import World
from shoal.parallel.expert_parallel.expert_load import Loads
from shoal.parallel.expert_parallel.token_routing import combine, dispatch, find_route
from shoal.trace.find.stacked_experts import ExpertLayer
from shoal.trace.isolation.replaced_forward import StandIn


class RoutedForward(StandIn):
    """A layer's forward, by experts of several ranks."""

    def __init__(self, layer: ExpertLayer, axis: World, loads: Loads) -> None:
        self.layer, self.axis, self.loads = layer, axis, loads
        super().__init__(layer.name, layer.part)

    # A compiled block leaves its graph here: what travels is a fact of the data.
    @torch.compiler.disable
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the layer's own forward gives, with all experts."""
        tokens, chosen, weights = self.layer.read(inputs, named)
        route = find_route(chosen, self.layer.experts, self.axis)
        self.loads.note(self.name, route.counts)
        rows = dispatch(tokens, route, chosen.shape[1], self.axis)
        whose = route.whose.to(chosen.dtype)
        if len(rows):
            results = self._compute(rows, whose, weights.dtype)
        else:
            row = torch.cat([rows, rows.new_ones(1, rows.shape[1])])
            results = self._compute(row, whose.new_zeros(1), weights.dtype)[:0]
        return combine(results, weights, route, self.axis).to(results.dtype)

    def _compute(self, rows: Tensor, whose: Tensor, dtype: torch.dtype) -> Tensor:
        """Each row by the expert it is for, not weighted, in the format that weights make of it."""
        ones = rows.new_ones(len(rows), 1, dtype=dtype)
        with telling(self.block, self.layer.counts, self.layer.experts // self.axis.size):
            results: Tensor = self.layer.call(self.forward, rows, whose.unsqueeze(1), ones)
        return results


@contextmanager
def telling(part: nn.Module, counts: tuple[str, ...], experts: int) -> Iterator[None]:
    """Inside, the part's own attributes say that it has so many experts."""
    kept = {name: getattr(part, name) for name in counts}
    try:
        for name in counts:
            setattr(part, name, experts)
        yield
    finally:
        for name, value in kept.items():
            setattr(part, name, value)
