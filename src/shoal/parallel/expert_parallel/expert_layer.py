"""Replacement of an expert layer of which this rank holds a part.

The layer's own forward computes this rank's experts on the rows that it receives, with weight 1
each. All else (routing before, weighting after) happens on the tokens' own rank, see
token_routing.py. If no row arrives, the layer runs on one dummy row, whose result is dropped. So
its parameters have zero gradients, its results the right dtype, and every rank joins every
exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fabric import World
from shoal.parallel.expert_parallel.expert_load import ExpertLoads
from shoal.parallel.expert_parallel.token_routing import combine, dispatch, plan_route
from shoal.trace.find.stacked_experts import ExpertLayer
from shoal.trace.isolation.replaced_forward import ReplacedForward


class RoutedForward(ReplacedForward):
    """Replacement of a layer's forward that uses the experts of several ranks."""

    calls_experts = True

    def __init__(self, layer: ExpertLayer, axis: World, loads: ExpertLoads) -> None:
        self.layer, self.axis, self.loads = layer, axis, loads
        super().__init__(layer.name, layer.part)

    # A graph break of a compiled block: the exchanged sizes depend on the data.
    @torch.compiler.disable
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the results of the layer's own forward, with all experts."""
        tokens, chosen, weights = self.layer.read(inputs, named)
        route = plan_route(chosen, self.layer.experts, self.axis)
        self.loads.add_counts(self.name, route.counts)
        rows = dispatch(tokens, route, chosen.shape[1], self.axis)
        whose = route.whose.to(chosen.dtype)
        if len(rows):
            results = self._compute(rows, whose, weights.dtype)
        else:
            row = torch.cat([rows, rows.new_ones(1, rows.shape[1])])
            results = self._compute(row, whose.new_zeros(1), weights.dtype)[:0]
        return combine(results, weights, route, self.axis).to(results.dtype)

    def _compute(self, rows: Tensor, whose: Tensor, dtype: torch.dtype) -> Tensor:
        """Run each row through its expert, unweighted, in the dtype that weighting gives."""
        ones = rows.new_ones(len(rows), 1, dtype=dtype)
        with override_expert_count(
            self.block, self.layer.counts, self.layer.experts // self.axis.size
        ):
            results: Tensor = self.layer.call(self.forward, rows, whose.unsqueeze(1), ones)
        return results


@contextmanager
def override_expert_count(part: nn.Module, counts: tuple[str, ...], experts: int) -> Iterator[None]:
    """Set the part's attributes to this number of experts while the context is open."""
    kept = {name: getattr(part, name) for name in counts}
    try:
        for name in counts:
            setattr(part, name, experts)
        yield
    finally:
        for name, value in kept.items():
            setattr(part, name, value)
