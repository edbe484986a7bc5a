"""Under tp a layer that is no graph may not draw random numbers; all others may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from user_modules import Gated

from shoal.base.errors import PlanError
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.random_draws import explain_keyed_blocks

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def plan(module: nn.Module, inputs: Tensor = X) -> ModelSplit:
    return plan_split(ForwardRecord(module, lambda m: m(inputs)), 2)


def drawn(module: nn.Module) -> list[tuple[str, str]]:
    """(function, innermost module) of what a pass draws."""
    return [
        (draw.function, draw.around[-1]) for draw in ForwardRecord(module, lambda m: m(X)).draws
    ]


def attention(h: Tensor, share: float) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=share)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.1),
    "scaled_dot_product_attention": lambda h: attention(h, 0.1),
    "rand_like": lambda h: h + torch.rand_like(h),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "randperm": lambda h: h[:, torch.randperm(h.shape[1])],
    "normal_": lambda h: h + torch.empty_like(h).normal_(),
}


@pytest.mark.parametrize("name", DRAWING)
def test_whatever_moves_a_generator_is_found_by_its_name(name: str) -> None:
    module = Gated(also=DRAWING[name])
    state = torch.get_rng_state()
    assert set(drawn(module)) == {(name, "layers.0"), (name, "layers.1")}
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_without_dropout_draws_nothing() -> None:
    assert not drawn(Gated(also=lambda h: attention(h, 0.0)))


def test_what_is_frozen_in_evaluation_mode_draws_nothing() -> None:
    module = Gated(dropout=0.1)
    for layer in module.layers:
        layer.drop.eval()
    assert not drawn(module)


def test_a_function_that_draws_in_code_that_is_no_graph_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        plan(Gated(also=DRAWING["dropout"]))
    assert str(refused.value) == (
        "layout.tp = 2: layers.0 draws random numbers (dropout) and cannot be traced "
        "(DataDependentOutputException: aten._local_scalar_dense.default), so they may depend on "
        "the layout; try: no dropout there, or layout.tp=1"
    )


def test_a_model_in_evaluation_mode_is_asked_for_what_it_draws_in_training() -> None:
    module = Gated(dropout=0.1).eval()  # as `from_pretrained` gives it; its run trains it
    module.layers[0].drop.p = 0.0
    with pytest.raises(PlanError, match=r"layers.1 draws .* \(dropout in layers.1.drop\)"):
        plan(module)
    assert not any(part.training for part in module.modules())
    assert not any("forward" in part.__dict__ for part in module.modules())


def outside() -> nn.Module:
    """Dropout around the blocks, where every rank computes one process's whole model."""
    return nn.Sequential(nn.Dropout(0.1), Gated(), nn.Dropout(0.1))


LEGAL: dict[str, Callable[[], nn.Module]] = {
    "in traced parts, with weights to cut and without": lambda: Gated(inside=0.1, norm=0.1),
    "outside of blocks": outside,
    "in graphs": lambda: Gated(dropout=0.1, looks=False),
}


@pytest.mark.parametrize("where", LEGAL)
def test_draws_elsewhere_are_legal(where: str) -> None:
    module = LEGAL[where]()
    assert drawn(module)
    split = plan(module)
    by_parts = any("split by its parts only" in line for line in split.notices)
    assert by_parts is (where != "in graphs")
    assert split.classes


class Layers(nn.Module):
    """Equal layers as attributes; the outermost Sequentials, inside of them, have the keys."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        for name in ("one", "two"):
            mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(dropout))
            setattr(self, name, nn.ModuleDict({"mlp": mlp}))

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.one, self.two):
            x = x + part["mlp"](x)
        return x


def inside(module: nn.Module, layer: str) -> str:
    record = ForwardRecord(module, lambda m: m(X))
    return explain_keyed_blocks(layer, record.blocks, record.draws)


def test_a_layer_whose_inner_blocks_key_its_dropout_is_no_graph() -> None:
    """Under tp and cp its masks were others than in one process, without a line."""
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    assert inside(module, "") == "dropout is keyed by blocks inside of it, like 0"
    assert not inside(module, "3")
    with pytest.raises(PlanError, match=r"stays whole: dropout is keyed by blocks inside of it"):
        plan(module)
    module[2].p = 0.0
    assert plan(module).classes, "without dropout it is one graph"
    assert inside(Layers(0.1), "one")
    assert not inside(Layers(0.0), "one")
