"""What of a model shares its tokens, by which attention, and what runs whole instead."""

from __future__ import annotations

import pytest
import threads
import torch
import torch.nn.functional as F
from context_threads import in_a_ring
from torch import Tensor, nn

from shoal.models.attention import causal_attention
from shoal.models.catalog import build
from shoal.parallel.context_parallel.ring import ring_attention
from shoal.parallel.context_parallel.split_units import plan_sequence_units
from shoal.parallel.spmd import split_block as split_block_module
from shoal.parallel.spmd.split_block import split_block, split_for_inputs
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trainer.autotune.sample_forward import _shorten_tokens


class Layer(nn.Module):
    """Self-attention; `mask` and `dropout` are what ranks cannot share."""

    def __init__(self, mask: str = "causal", dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        window = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-3)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window if self.mask == "window" else None,
            is_causal=self.mask == "causal",
            dropout_p=self.dropout,
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def simulated(split, layer: nn.Module, x: Tensor) -> None:
    """The ranks compute what the layer computes, forward and backward."""
    expected, _ = threads.whole_pass(split, layer, (x,), {})
    for got in threads.simulate(split, layer, (x,), {}):
        assert torch.allclose(got.outputs[0], expected.outputs[0], rtol=1e-12, atol=1e-13)
        assert torch.allclose(got.inputs[0], expected.inputs[0], rtol=1e-12, atol=1e-13)
        for name, gradient in expected.parameters.items():
            assert torch.allclose(got.parameters[name], gradient, rtol=1e-12, atol=1e-13), name


@pytest.fixture(autouse=True)
def _ring(monkeypatch):
    monkeypatch.setattr(threads, "on_ranks", in_a_ring)


def divided(layer: nn.Module, x: Tensor, attention=ring_attention):
    return split_block(
        layer, (x,), {}, 2, sequence_dim=1, split_parameters=False, attention=attention
    )


@pytest.mark.parametrize("mask", ["causal", "none", "window"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_is_shared_where_it_can_be(mask: str, dropout: float) -> None:
    layer = Layer(mask, dropout).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    split = divided(layer, x)
    gathers = [e for e in split.exchanges if e.kind == "all_gather"]
    assert bool(gathers) == (dropout > 0)
    assert "ring_attention" in split.run.code or gathers
    simulated(split, layer, x)
    longer = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)
    simulated(split_for_inputs(split, layer, (longer,), {}), layer, longer)


@pytest.mark.parametrize("kind", ["window", "llama"])
def test_other_lengths_take_labels_over(monkeypatch, kind: str) -> None:
    """Nothing is run to find rules, which would take the memory of all tokens on every rank."""
    layer = Layer("window")
    if kind == "llama":
        layer = build("llama", LLAMA, vocabulary=9, sequence=8).blocks[0]
    layer = layer.double()
    x, longer, more = (
        torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 8), (2, 12), (3, 12))
    )
    split = divided(layer, x)
    monkeypatch.setattr(split_block_module.RULES, "find", None)
    simulated(split_for_inputs(split, layer, (longer,), {}), layer, longer)
    with pytest.raises(TypeError):  # another batch: solved anew
        split_for_inputs(split, layer, (more,), {})


LLAMA = {"dim": 8, "layers": 1, "heads": 2}


def test_our_attention_is_one_operation_for_who_traces_it_only() -> None:
    q = torch.randn(1, 2, 300, 4)
    by_blocks = causal_attention(q, q, q)
    assert not torch.equal(by_blocks, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    model = build("llama", {"dim": 8, "layers": 2, "heads": 2}, vocabulary=9, sequence=300)
    x = torch.randn(1, 300, 8, requires_grad=True)
    split = divided(model.blocks[0], x)
    assert split.run.code.count("ring_attention") >= 1
    assert not split.exchanges
    assert torch.equal(causal_attention(q, q, q), by_blocks)


def test_blocks_what_is_beside_them_and_lookups() -> None:
    model = build("gpt", {"dim": 8, "layers": 2, "heads": 2}, vocabulary=9, sequence=8)
    ids = torch.zeros(2, 8, dtype=torch.long)
    units = plan_sequence_units(ForwardRecord(model, lambda module: module(ids)), 2, ring_attention)
    assert [one.names for one in units.classes] == [("blocks.0", "blocks.1"), ("norm",)]
    assert units.lookups == ("embedding", "positions")
    assert units.length == 8
    assert not units.whole


def test_a_single_layer_is_a_block_too() -> None:
    model = build("llama", {"dim": 8, "layers": 1, "heads": 2}, vocabulary=9, sequence=8)
    ids = torch.zeros(2, 8, dtype=torch.long)
    units = plan_sequence_units(ForwardRecord(model, lambda module: module(ids)), 2, ring_attention)
    assert [one.names for one in units.classes] == [("blocks.0",), ("norm",)]


class Looks(nn.Module):
    """Decides by numbers what to do: no graph, but its parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if float(x.detach().sum()) > 0 else x * self.second(x)


def test_what_is_no_graph_shares_in_its_parts() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), Looks(), Looks())
    ids = torch.zeros(2, 8, dtype=torch.long)
    units = plan_sequence_units(ForwardRecord(model, lambda module: module(ids)), 2, ring_attention)
    assert units.whole["1"].startswith("shares tokens in its parts only: ")
    assert {name for one in units.classes for name in one.names} >= {"1.first", "2.first"}


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ((torch.zeros(2, 8192, dtype=torch.long),) * 2, 256),
        ({"ids": torch.zeros(2, 8192, dtype=torch.long), "labels": torch.zeros(2)}, 256),
        ((torch.zeros(2, 8191, dtype=torch.long),) * 2, 8191),
        ((torch.zeros(2, 128, dtype=torch.long),) * 2, 128),
        ((torch.zeros(2, 8192, dtype=torch.long), torch.zeros(2, 8192, 3)), 8192),
    ],
    ids=["ids", "dict", "do not divide", "short", "not ids alone"],
)
def test_a_look_takes_few_tokens_of_long_sequences(batch, tokens: int) -> None:
    short = _shorten_tokens(batch, 4)
    first = next(iter(short.values())) if isinstance(short, dict) else short[0]
    assert first.shape[1] == tokens
