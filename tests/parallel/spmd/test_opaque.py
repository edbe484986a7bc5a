"""Parts that are no graph (experts) as one operation of their layer: split together, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_split_transformers import CASTS, EXACT, captured
from threads import counts, difference
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.split_block import RULES, split_block, split_for_inputs
from shoal.parallel.tensor_parallel import may_split_experts
from shoal.trace.graph.layer_graph import UntraceableLayer
from shoal.trace.graph.layer_groups import LayerGrouping
from shoal.trace.graph.opaque_parts import trace_with_opaque
from shoal.trace.isolation.layer_calls import LayerCall

DIM, INNER, EXPERTS = 16, 24, 4


class Experts(nn.Module):
    """Stacked experts with biases, called one by one; `fault`: what makes it no mere operation."""

    def __init__(self, dim: int = DIM, inner: int = INNER, fault: str = "") -> None:
        super().__init__()
        self.fault, self.sharpness = fault, 1.0
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * inner, dim) / dim**0.5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * inner))
        self.down = nn.Parameter(torch.randn(EXPERTS, dim, inner) / inner**0.5)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, dim))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor):
        if self.fault == "draws":
            tokens = F.dropout(tokens, 0.5)
        if self.fault == "counts":
            self.seen += 1
        result = torch.zeros_like(tokens)
        for expert in chosen.unique():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[rows], self.up[expert], self.up_bias[expert]).chunk(2, -1)
            hidden = F.silu(self.sharpness * gate) * up
            own = F.linear(hidden, self.down[expert], self.down_bias[expert])
            result = result.index_add(0, rows, own * weights[rows, places, None])
        if self.fault == "squares":
            result = result.square()
        return (result, weights.sum()) if self.fault == "tells" else result


class Layer(nn.Module):
    """A router, experts, and a feed-forward part beside them."""

    def __init__(self, fault: str = "", number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(fault=fault)
        self.inner, self.outer = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).view(-1, DIM)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        mixed = self.experts(flat, chosen, weights)
        mixed = mixed[0] * mixed[1] if isinstance(mixed, tuple) else mixed
        return x + (mixed + self.outer(F.gelu(self.inner(flat)))).view(x.shape)


def layer(**options) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    return Layer(**options).double(), (x,)


@pytest.mark.parametrize("degree", [2, 4])
def test_experts_are_split_with_what_is_around_them(degree: int) -> None:
    block, args = layer()
    split = split_block(block, args, {}, degree)
    held = {n.removeprefix("experts."): label for n, label in split.parameters.items()}
    assert held["up"] == Split(1, 2)
    assert held["up_bias"] == Split(1, 2)
    assert held["down"] == Split(2)
    assert "down_bias" not in held, "rank 0 alone hands it in"
    assert counts(split) == {"all_reduce forward": 1, "all_reduce backward": 1}
    assert difference(split, block, args, {}) < EXACT
    fewer = (torch.randn(1, 5, DIM, dtype=torch.float64, requires_grad=True),)
    assert difference(split_for_inputs(split, block, fewer, {}), block, fewer, {}) < EXACT
    assert not any("forward" in part.__dict__ for part in block.modules()), "it is as it was"


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_mixtral(degree: int) -> None:
    block, args, kwargs = captured("mixtral")
    split = split_block(block, args, kwargs, degree)
    assert split.parameters["mlp.experts.gate_up_proj"] == Split(1, 2)
    assert split.parameters["mlp.experts.down_proj"] == Split(2)
    assert counts(split) == {"all_reduce forward": 2, "all_reduce backward": 2}
    assert difference(split, block, args, kwargs) < CASTS


@pytest.mark.parametrize("fault", ["draws", "counts", "squares", "tells"])
def test_what_is_no_sum_over_cut_experts_is_left_to_its_layer(fault: str) -> None:
    block, args = layer(fault=fault)
    with pytest.raises(UntraceableLayer):
        split_block(block, args, {}, 2)


def test_what_draws_is_no_operation() -> None:
    """How often it draws may hang on numbers, and the layouts' numbers round differently."""
    block, args = layer(fault="draws")
    with pytest.raises(UntraceableLayer):
        trace_with_opaque(block, args, {})


def test_experts_that_cp_or_ep_divide_too_are_not_taken() -> None:
    assert may_split_experts(Layout(tp=2, pp=2))
    assert not may_split_experts(Layout(tp=2, cp=2))
    assert not may_split_experts(Layout(tp=2, ep=2, dp_shard=2))


def test_grouped_products_are_found_out_in_bfloat16() -> None:
    """The library's own choice: its operation knows no float64, in which rules are found."""
    block, args, kwargs = captured("mixtral")
    block = block.bfloat16()
    for part in block.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "grouped_mm"
    args = tuple(a.bfloat16() if torch.is_tensor(a) else a for a in args)
    narrow = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, kwargs
    )
    split = split_block(block, args, narrow, 2)
    assert split.opaque == ("mlp.experts",)
    assert split.parameters["mlp.experts.gate_up_proj"] == Split(1, 2)


def test_rules_of_large_experts_are_found_at_smaller_sizes(monkeypatch) -> None:
    """Their matrices of 2^24 elements would take seconds for each way to cut them."""
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = Experts(dim=1024, inner=2048)
    part = Experts()
    for own, large in zip(part.parameters(), shapes.parameters(), strict=True):
        own.data = torch.zeros(()).expand(large.shape)
    made: list[int] = []
    search = RULES._experiment

    def noted(call):
        made.append(sum(value.elements for value in call.values))
        return search(call)

    monkeypatch.setattr(RULES, "_experiment", noted)
    chosen = torch.randint(0, EXPERTS, (6, 2))
    holder = Holder(part)
    split = split_block(holder, (torch.randn(6, 1024), chosen, torch.rand(6, 2)), {}, 2)
    assert split.parameters["part.up"] == Split(1, 2)
    assert max(made) < 1 << 18


class Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.part(*given)


def test_layers_whose_experts_hold_other_numbers_are_not_alike() -> None:
    three = nn.ModuleList([layer(number=k)[0] for k in range(3)])
    three[2].experts.sharpness = 2.0
    calls = {str(k): LayerCall(layer()[1], {}, ()) for k in range(3)}
    found = LayerGrouping(three, opaque=True).group_layers(["0", "1", "2"], calls)
    assert found == [["0", "1"], ["2"]]


def test_a_layer_that_is_a_graph_has_no_such_parts() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert trace_with_opaque(block, (torch.ones(1, 4),), {}).opaque == ()
