"""Weights are lent to a device operation by operation; here the device is `meta`, which has no data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.models.catalog import build
from shoal.trace.isolation.stream_weights import stream_weights

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """The sizes of tensors that are copied to the device, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and out.is_meta:
            self.elements.append(out.numel())
        return out


class Mixed(nn.Module):
    """Reads weights in ways that a layer's own forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, ids: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.embed(ids)
        mask = torch.zeros(4, device=self.scale.device)  # asked where it is
        x = self.norm(x * self.scale.abs() + mask)
        return F.linear(x, self.embed.weight[1:].t().contiguous().t())


def test_a_pass_runs_on_the_device_with_weights_that_stay() -> None:
    model = build("llama", {"dim": 16, "layers": 2}, vocabulary=32, sequence=8)
    copies = Copies()
    with stream_weights(model, META), copies:
        out = model(torch.zeros(2, 8, dtype=torch.long, device=META))
    assert all(not p.is_meta for p in model.parameters())
    assert out is not None
    # One operation's weights at a time, each once: never a copy of the whole.
    assert sum(copies.elements) <= 1.5 * sum(p.numel() for p in model.parameters())
    assert max(copies.elements) == max(p.numel() for p in model.parameters())


def test_reads_beside_layers_are_lent_too() -> None:
    model = Mixed()
    with stream_weights(model, META):
        assert model.scale.device == META
        assert model.scale.shape == (4,)
        model.count = torch.zeros(())  # not lent: no part of the module when it began
        out = model.eval()(torch.zeros(3, dtype=torch.long, device=META))
    assert out.is_meta
    assert out.shape == (3, 7)
    assert model.scale.device.type == "cpu"


def test_copies_of_layers_are_on_the_device_and_shapes_cost_nothing() -> None:
    model = nn.Linear(4, 4)
    copies = Copies()
    with stream_weights(model, META), copies:
        assert model.weight.numel() == 16
        assert not copies.elements
        twin = copy.deepcopy(model)
        assert model.weight.detach().to("cpu", torch.float64, copy=True).sum().device.type == "cpu"
    assert twin.weight.is_meta
    assert not model.weight.is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_there_already_is_left_alone(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    copies = Copies()
    with stream_weights(model, torch.device(device)), copies:
        assert model(torch.ones(1, 4, device=device)).device.type == device
    assert not copies.elements
