"""A graph's constants are numbers, or there is no graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.trace.graph.layer_graph import UntraceableLayer, trace_layer


class Clipped(nn.Linear):
    """Clips its weights while it runs, as a part of Gemma 3n does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_constant_without_numbers_is_no_graph() -> None:
    with pytest.raises(UntraceableLayer, match="it takes a weight's `.data`"):
        trace_layer(Clipped(4, 4), (torch.randn(2, 4),), {})
