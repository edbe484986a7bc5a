"""Layers of experts are found by how they are called, and taken apart only if that is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.models.catalog import build
from shoal.parallel.expert_parallel.expert_check import NotExpertsError, check_layer
from shoal.parallel.expert_parallel.expert_load import format_balance
from shoal.trace.find.stacked_experts import ExpertLayer
from shoal.trace.flow.forward_record import ForwardRecord


class Stacked(nn.Module):
    """Experts that are one matrix each, called in any order of arguments."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.number, self.width = experts, dim
        self.matrix = nn.Parameter(torch.randn(experts, dim, dim))

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """[n, dim], [n, k], [n, k] to [n, dim]."""
        every = torch.einsum("nd,edh->neh", x, self.matrix)
        dealt = torch.zeros(len(x), self.number, dtype=share.dtype)
        return torch.einsum("neh,ne->nh", every, dealt.scatter_add(1, index, share))


class Model(nn.Module):
    """A router before one layer of experts."""

    def __init__(self, layer: nn.Module, dim: int = 6, top_k: int = 2) -> None:
        super().__init__()
        self.router, self.layer, self.top_k = nn.Linear(dim, 4), layer, top_k

    def forward(self, x: Tensor) -> Tensor:
        """[n, dim] to the same."""
        odds, chosen = self.router(x).softmax(-1).topk(self.top_k, -1)
        mixed: Tensor = self.layer(x, share=odds, index=chosen)
        return mixed


def found(model: nn.Module, *inputs: Tensor) -> list[ExpertLayer]:
    return ForwardRecord(model, lambda module: module(*inputs)).stacked_experts()


def one_of(layer: nn.Module, dim: int = 6, top_k: int = 2) -> ExpertLayer:
    (only,) = found(Model(layer, dim, top_k), torch.randn(5, dim))
    return only


def test_our_mixture_and_mixtral_are_found() -> None:
    model = build("moe", {"dim": 32, "layers": 2, "experts": 4}, vocabulary=50, sequence=16)
    layers = found(model, torch.randint(50, (2, 8)))
    assert [layer.name for layer in layers] == [f"blocks.{n}.mixture.experts" for n in range(2)]
    assert all(layer.experts == 4 for layer in layers)
    assert check_layer(layers[0], 2).counts == ()
    assert layers[0].kind == layers[1].kind
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    for how, counts in (("eager", ()), ("grouped_mm", ("num_experts",))):
        mixtral = transformers.MixtralForCausalLM(config)
        mixtral.set_experts_implementation(how)
        (layer,) = found(mixtral, torch.randint(50, (2, 8)))
        assert layer.name == "model.layers.0.mlp.experts"
        assert check_layer(layer, 2).counts == counts, how


def test_arguments_are_told_apart_by_what_they_are() -> None:
    layer = one_of(Stacked(4, 6))
    assert layer.roles == (0, "index", "share")
    wide = one_of(Stacked(4, 2), dim=2)  # as many choices as numbers in a token
    assert wide.roles == (0, "index", "share")


def test_a_layer_is_told_its_number_in_the_attribute_that_counts() -> None:
    assert check_layer(one_of(Stacked(4, 6)), 2).counts == ("number",)
    assert check_layer(one_of(Stacked(4, 4), dim=4), 2).counts == ("number",)  # its width is 4 too
    assert check_layer(one_of(Stacked(4, 6)), 4).counts == ()  # one expert: torch spreads it itself


class Normed(Stacked):
    """Weights are made to add up to 1: with one choice at a time each would be 1."""

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """As the plain one."""
        return super().forward(x, index, share / share.sum(-1, keepdim=True))


class Shared(Stacked):
    """Something is added that no choice has a part in."""

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """As the plain one."""
        return x + super().forward(x, index, share)


class Twice(Stacked):
    """A weight counts squared."""

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """As the plain one."""
        return super().forward(x, index, share.square())


class Neighbours(Stacked):
    """Experts look at each other's matrices."""

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """As the plain one."""
        return super().forward(x, index, share) * self.matrix.mean()


class Dropping(Stacked):
    """Random numbers."""

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        """As the plain one."""
        return super().forward(nn.functional.dropout(x, 0.3, self.training), index, share)


@pytest.mark.parametrize("kind", [Normed, Shared, Twice, Neighbours])
def test_what_is_no_sum_over_experts_is_refused(kind: type[Stacked]) -> None:
    with pytest.raises(NotExpertsError, match="with its experts apart it is off by"):
        check_layer(one_of(kind(4, 6)), 2)


def test_random_numbers_are_refused_in_whatever_mode_the_model_is() -> None:
    layer = Dropping(4, 6).eval()
    state = torch.get_rng_state()
    with pytest.raises(NotExpertsError, match="draws random numbers"):
        check_layer(one_of(layer), 2)
    assert not layer.training
    torch.set_rng_state(state)


class Other(nn.Module):
    """Stacked weights that are called otherwise."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.matrix, self.how = nn.Parameter(torch.randn(4, 6, 6)), how
        self.more = nn.Linear(6, 5) if how == "other sizes" else None

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Not experts."""
        return x @ self.matrix[0]


@pytest.mark.parametrize("how", ["alone", "flags", "too many", "out of range", "other sizes"])
def test_other_parts_are_not_taken_for_experts(how: str) -> None:
    chosen, odds = torch.randint(4, (5, 2)), torch.rand(5, 2)
    rest = {
        "alone": (),
        "flags": (chosen > 1, odds),
        "too many": (chosen, odds, odds),
        "out of range": (chosen + 5, odds),
        "other sizes": (chosen, odds),
    }[how]
    assert found(nn.ModuleList([Other(how)])[0], torch.randn(5, 6), *rest) == []


def test_the_line_about_balance_counts_what_nobody_took() -> None:
    line = format_balance({"a": torch.tensor([6, 0, 2, 0, 2])}, 5)
    assert line == (
        "experts over 5 steps: the fullest of a got 3.00 × the mean of its layer (3.00 × over all "
        "layers), 2 of 4 got nothing, 20.0 % of places had none"
    )
