"""Blocks with a bf16 residual stream: which weights they read in bf16, and what stays fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.trace.isolation.narrow_blocks import (
    NarrowForward,
    NarrowNorm,
    list_narrow_weights,
    list_stream_norms,
)

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """A linear layer, a batch norm, and a weight that the model's head shares."""

    def __init__(self, shared: nn.Parameter):
        super().__init__()
        self.up, self.norm, self.shared = nn.Linear(4, 4), nn.BatchNorm1d(4), shared

    def forward(self, x, loss):
        self.seen = x.dtype, self.up.weight.dtype, self.norm.weight.dtype, self.shared.dtype
        return self.norm(self.up(x)) + x * self.shared, loss + x.float().mean()


class Model(nn.Module):
    """Two blocks, a head, a last norm."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block(self.head) for _ in range(2))
        self.norm = nn.LayerNorm(4)


def test_shared_weights_and_batch_norms_have_no_narrow_copy():
    model = Model()
    read = list_narrow_weights(model, model.blocks)
    names = {name for name, p in model.named_parameters() if id(p) in read}
    assert names == {f"blocks.{k}.up.{own}" for k in range(2) for own in ("weight", "bias")}
    assert list(list_stream_norms(model, model.blocks)) == ["norm"]


def test_a_block_computes_in_bf16_and_its_weights_get_fp32_gradients():
    model = Model()
    block = NarrowForward("blocks.0", model.blocks[0], "cpu").block
    with torch.autocast("cpu", BF16):
        h, loss = block(torch.randn(8, 4, requires_grad=True), torch.zeros(()))
    assert block.seen == (BF16, BF16, FP32, BF16)
    assert (h.dtype, loss.dtype) == (BF16, FP32)
    assert isinstance(block.up.weight, nn.Parameter), "the cast stayed"
    h.float().sum().backward()
    assert block.up.weight.grad.dtype == model.head.grad.dtype == FP32


def test_a_norm_follows_what_it_receives():
    norm = nn.LayerNorm(4)
    NarrowNorm("norm", norm, "cpu")
    assert [norm(torch.ones(2, 4, dtype=dtype)).dtype for dtype in (BF16, FP32)] == [BF16, FP32]


def test_other_errors_of_a_block_stay_its_own():
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    NarrowForward("blocks.0", block, "cpu")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        block(torch.ones(1, 3))
    assert not isinstance(caught.value, PlanError)
