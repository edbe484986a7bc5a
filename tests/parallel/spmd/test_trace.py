"""Tracing: a layer becomes a graph that computes the same, and nothing about the layer changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocks import MLP, GPTBlock, Residual
from torch import nn

from shoal.models.norm import RMSNorm
from shoal.trace.graph.layer_graph import UntraceableLayer, list_replaceable_nodes, trace_layer
from shoal.trace.graph.maskable_attention import compute_attention

X = torch.randn(3, 12, 48, dtype=torch.float64)


def run(traced, block: nn.Module, *inputs: torch.Tensor):
    flat = traced.module(*block.parameters(), *block.buffers(), *inputs)
    return traced.rebuild(flat)


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
def test_the_graph_computes_the_same_bits(layout: str) -> None:
    block = GPTBlock(layout).double()
    assert torch.equal(run(trace_layer(block, (X,), {}), block, X), block(X))


def test_nothing_about_the_layer_changes() -> None:
    block = Residual().double()
    before = {n: t.clone() for n, t in block.state_dict().items()}
    trace_layer(block, (torch.randn(2, 8, 5, 5, dtype=torch.float64),), {})
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in block.parameters())


def test_dropout_is_traced_without_a_draw() -> None:
    block = GPTBlock("split", dropout=0.3).double()
    state = torch.get_rng_state()
    trace_layer(block, (X,), {})
    assert torch.equal(torch.get_rng_state(), state)


def test_operations_stay_whole() -> None:
    names = [str(t) for t in trace_layer(GPTBlock("split").double(), (X,), {}).operations()]
    assert names.count("aten.linear.default") == 4
    assert names.count("aten.layer_norm.default") == 2
    assert names.count("aten.scaled_dot_product_attention.default") == 1
    assert not any("assert" in name for name in names)


def test_a_custom_function_keeps_its_own_backward() -> None:
    norm = RMSNorm(48, 1e-5).double()
    traced = trace_layer(norm, (X,), {})
    assert "_RMSNorm" in [getattr(t, "__name__", "") for t in traced.operations()]
    assert torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function"
    x = X.clone().requires_grad_()
    run(traced, norm, x).sum().backward()
    again = X.clone().requires_grad_()
    norm(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "mask", "grouped"])
def test_attention_with_dropout_is_written_out_bit_for_bit(kind: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 10, 8, dtype=torch.float64)
    heads = 2 if kind == "grouped" else 4
    k, v = torch.randn(2, 2, heads, 10, 8, dtype=torch.float64)
    mask = {"bool mask": torch.ones(10, 10).tril().bool(), "mask": torch.randn(10, 10).double()}
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(
        q, k, v, mask.get(kind), 0.3, kind == "causal", enable_gqa=kind == "grouped"
    )
    torch.manual_seed(1)
    found = compute_attention(
        q, k, v, mask.get(kind), dropout=0.3, causal=kind == "causal", scale=None,
        grouped=kind == "grouped",
    )  # fmt: skip
    assert torch.equal(found, expected)


def test_a_traced_layer_draws_the_masks_that_it_drew_before() -> None:
    block = GPTBlock("split", dropout=0.3).double()
    torch.manual_seed(4)
    expected = block(X)
    torch.manual_seed(4)
    assert torch.equal(run(trace_layer(block, (X,), {}), block, X), expected)


def test_whole_shapes_of_parameters_that_are_cut() -> None:
    block = MLP().double()
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    whole = trace_layer(block, (X,), {}).operations()
    for p in block.parameters():
        p.data = p.data[: p.shape[0] // 2]
    assert trace_layer(block, (X,), {}, shapes).operations() == whole


def test_buffers_that_change_are_named() -> None:
    traced = trace_layer(Residual().double(), (torch.randn(2, 8, 5, 5).double(),), {})
    assert "norm1.num_batches_tracked" in traced.mutated


class Dynamic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(-1) > 0] if x.sum().item() > 0 else x


def test_what_depends_on_numbers_cannot_be_traced() -> None:
    with pytest.raises(UntraceableLayer, match="DataDependent"):
        trace_layer(Dynamic(), (X,), {})


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x * 2
        first += 1  # nobody reads the old one
        second = x * 3
        view = second[..., :4]
        view.add_(1)  # read through `second`
        return first + second


def test_which_in_place_operations_may_write_elsewhere() -> None:
    graph = trace_layer(InPlace(), (X,), {}).graph
    replaceable = {node.name for node in list_replaceable_nodes(graph)}
    every = {n.name for n in graph.nodes if str(n.target).endswith("_.Tensor")}
    assert len(every) == 2
    assert len(replaceable) == 1
