"""What stands on a stage for parts that live elsewhere: shapes from numbers, and a device."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from chain import CPU, Chain, assert_equal_to_whole
from torch import Tensor, nn
from user_modules import HIDDEN, Layer, made, numbers

from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.trace.flow.forward_record import ForwardRecord


class Positions(nn.Embedding):
    """Gives positions for a batch of that size, as ProphetNet's do; no tensor goes in."""

    def forward(self, sizes: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.ones(sizes, dtype=torch.long, device=device).cumsum(1) - 1
        return super().forward(positions), positions


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions(9, HIDDEN)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        placed, positions = self.positions((x.shape[0], x.shape[1]), x.device)
        # Of no consequence on later stages, and of the batch's size all the same.
        h = torch.cat([x, placed * positions[..., None]], 1)
        for block in self.blocks:
            h = block(h)
        return h


class Asking(nn.Module):
    """Asks its first weight, which is of the first stage, where to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Numbered()

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(next(self.parameters()).device)
        ready = torch.ones(h.shape[1], device=next(self.inner.parameters()).device).all().item()
        for block in self.inner.blocks:
            h = block(h if ready else -h)
        return h + x.to(h.device) * torch.arange(HIDDEN, device=next(self.parameters()).device)


def called(module: nn.Module, batch: int = 2) -> Any:
    return module(numbers(batch, 6, HIDDEN))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", [Numbered, Asking])
def test_other_batch_sizes_and_devices_asked_of_weights(kind: type[nn.Module], told: bool) -> None:
    model = made(kind)
    cut = cut_stages(ForwardRecord(model, called), 2)
    if told:
        cut = StageCut.from_json(json.loads(json.dumps(cut.to_json())), model, CPU)
    assert_equal_to_whole(Chain(model, cut), model, [called, lambda m: called(m, 1)])
