"""The mixture of experts computes its formula, drops no token, and says how it is balanced."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from shoal.models.catalog import build, find_default_loss
from shoal.models.loss import Unprojected, token_loss
from shoal.models.moe import (
    Mixture,
    MoE,
    Routed,
    apply_capacity,
    balanced_loss,
    dropped_places,
)
from shoal.trace.costs.traced_facts import trace_facts


def small(**changes: object) -> MoE:
    torch.manual_seed(3)
    arguments = {
        "dim": 32, "layers": 2, "heads": 4, "vocabulary": 50, "experts": 5, "hidden": 48, **changes,
    }  # fmt: skip
    model = build("moe", arguments, sequence=64)
    assert isinstance(model, MoE)
    return model.double()


def loads_of(model: MoE) -> dict[str, Tensor]:
    """(token, choice) pairs of each expert in the last forward pass, by mixture."""
    parts = dict(model.named_modules()).items()
    return {k: m.load for k, m in parts if isinstance(m, Mixture) and m.load is not None}


def mixture(top_k: int = 2, wide: float = 1.0) -> tuple[Mixture, Tensor]:
    """A mixture whose router has opinions, and tokens for it."""
    torch.manual_seed(5)
    made = Mixture(16, 24, experts=5, top_k=top_k, residual_std=0.02).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
        made.router.weight.mul_(wide)
    return made, torch.randn(3, 11, 16, dtype=torch.float64, requires_grad=True)


def by_formula(made: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, expert by expert."""
    odds = (x @ made.router.weight.T).softmax(-1)
    rows, share = [], torch.zeros(5, dtype=torch.float64)
    for token, p in zip(x.reshape(-1, 16), odds.reshape(-1, 5), strict=True):
        best = p.detach().argsort(descending=True)[: made.top_k].tolist()
        total = sum(p[e] for e in best)
        y = torch.zeros(16, dtype=torch.float64)
        for e in best:
            inner = F.silu(made.experts.gate[e] @ token) * (made.experts.up[e] @ token)
            y = y + p[e] / total * (made.experts.down[e] @ inner)
            share[e] += 1
        rows.append(y)
    balance = 5 * (share / share.sum() * odds.reshape(-1, 5).mean(0)).sum()
    return torch.stack(rows).view_as(x), balance


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_mixture_is_its_formula(top_k: int) -> None:
    made, x = mixture(top_k)
    ours, theirs = made(x), by_formula(made, x)
    weights = [x, *made.parameters()]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        upstream = torch.randn(mine.shape, dtype=torch.float64)
        pair = [
            torch.autograd.grad(y, weights, upstream, retain_graph=True, materialize_grads=True)
            for y in (mine, other)
        ]
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_no_token_is_dropped_and_idle_experts_have_zero_gradients() -> None:
    made, x = mixture(1, wide=1000.0)
    x = x.detach().abs()
    with torch.no_grad():
        made.router.weight.fill_(-1.0)
        made.router.weight[3] = 1.0  # everything goes to one expert
    out, balance = made(x)
    out.sum().backward()
    assert made.load is not None
    assert made.load.tolist() == [0, 0, 0, 33, 0]
    assert float(balance.detach()) == pytest.approx(5.0)  # as uneven as five experts can be
    assert (out.detach().abs().sum(-1) > 0).all()
    for weight in made.experts.parameters():
        assert weight.grad is not None
        assert weight.grad[3].any()
        assert not weight.grad[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("capacity", [0.5, 1.0, 5.0])
def test_capacity_drops_what_is_over_and_counts_it(capacity: float) -> None:
    """The other choices of a token keep their weights; a token may lose all of them."""
    made, x = mixture(2)
    whole = made(x)[0]
    every = made.load
    made.capacity = capacity
    out, _ = made(x)
    most = math.ceil(capacity * 33 * 2 / 5)
    assert made.load is not None
    assert every is not None
    assert made.dropped is not None
    assert made.load.tolist() == [min(n, most) for n in every.tolist()]
    assert int(made.dropped) == int(every.sum() - made.load.sum())
    if capacity == 5.0:
        torch.testing.assert_close(out, whole, rtol=0, atol=0)
        return
    assert int(made.dropped) > 0
    odds = made.router(x).softmax(-1).view(33, 5)
    weights, chosen = odds.topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    left, expected = [most] * 5, torch.zeros(33, 16, dtype=torch.float64)
    for choice in range(2):  # all first choices before all second ones
        for token, e in enumerate(chosen[:, choice].tolist()):
            if left[e]:
                left[e] -= 1
                row = x.view(33, 16)[token]
                inner = F.silu(made.experts.gate[e] @ row) * (made.experts.up[e] @ row)
                expected[token] += weights[token, choice] * (made.experts.down[e] @ inner)
    torch.testing.assert_close(out.view(33, 16), expected, rtol=0, atol=1e-12)
    (mine,) = torch.autograd.grad(out.square().sum(), x)
    (other,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_first_choices_come_before_second_ones() -> None:
    chosen = torch.tensor([[0, 1], [2, 1], [1, 0], [1, 2]])
    assert apply_capacity(chosen, 3, 2).tolist() == [[0, 3], [2, 3], [1, 0], [1, 2]]


def test_balance_is_one_where_the_router_is_indifferent() -> None:
    made, x = mixture()
    with torch.no_grad():
        made.router.weight.zero_()
    assert float(made(x)[1].detach()) == pytest.approx(1.0)


def test_training_adds_the_auxiliary_loss_per_target_and_evaluation_does_not() -> None:
    model, tokens = small(balance=0.5), torch.randint(50, (2, 17))
    targets = tokens[:, 1:].clone()
    targets[0, :9] = -100
    outputs = model(tokens[:, :-1])
    assert isinstance(outputs, Routed)
    assert find_default_loss("moe") is balanced_loss
    total, count = balanced_loss(outputs, targets)
    plain, _ = token_loss(outputs, targets)
    means = []
    for block in model.blocks:
        block.mixture.register_forward_hook(lambda _m, _i, out: means.append(out[1]))
    model(tokens[:, :-1])
    assert int(count) == 32 - 9
    assert float((total - plain).detach() / count) == pytest.approx(
        0.5 * float(sum(means).detach()) / 2
    )
    total.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    model.eval()
    rested = model(tokens[:, :-1])
    assert type(rested) is Unprojected
    assert float(balanced_loss(rested, targets)[0].detach()) == pytest.approx(float(plain.detach()))
    assert type(small(balance=0.0)(tokens)) is Unprojected


def test_loads_are_told_by_name() -> None:
    model = small()
    assert loads_of(model) == {}
    model(torch.randint(50, (2, 16)))
    loads = loads_of(model)
    assert list(loads) == ["blocks.0.mixture", "blocks.1.mixture"]
    assert all(int(load.sum()) == 2 * 16 * 2 for load in loads.values())
    assert dropped_places(model) == {}
    model = small(capacity=0.5)
    model(torch.randint(50, (2, 16)))
    lost = dropped_places(model)
    assert list(lost) == list(loads)
    assert all(int(n) + int(loads_of(model)[k].sum()) == 64 for k, n in lost.items())


def test_routed_outputs_are_a_tree() -> None:
    outputs = small()(torch.randint(50, (2, 16)))
    leaves, tree = pytree.tree_flatten(outputs)
    assert [leaf is t for leaf, t in zip(leaves, (outputs.hidden, outputs.auxiliary), strict=True)]
    again = pytree.tree_unflatten(leaves, tree)
    for field in dataclasses.fields(Routed):
        assert getattr(again, field.name) is getattr(outputs, field.name)


def test_initial_weights_and_first_loss() -> None:
    model = small(dim=64, layers=8, tied=False)
    for name, weight in model.state_dict().items():
        if weight.dim() >= 2:
            narrow = name.endswith(("attention.o.weight", "experts.down"))
            expected = 0.02 / 4 if narrow else 0.02
            assert float(weight.std()) == pytest.approx(expected, rel=0.15), name
    tokens = torch.randint(50, (4, 33))
    total, count = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert float(total.detach() / count) == pytest.approx(math.log(50), rel=0.02)


def test_learns_and_spreads_the_load() -> None:
    tokens = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(0))
    fullest = {}
    for balance in (0.0, 0.3):
        model = small(balance=balance, top_k=1)
        with torch.no_grad():  # one expert is preferred at first
            for block in model.blocks:
                block.mixture.router.weight[0] += 0.05
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(15):
            total, count = balanced_loss(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append(float(total.detach() / count))
        assert losses[-1] < losses[0] - 0.3
        fullest[balance] = max(float(n.max() / n.sum()) for n in loads_of(model).values())
    assert fullest[0.3] < fullest[0.0]


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_plans_see_even_loads_where_there_are_only_shapes(kernels: str) -> None:
    """Work of the experts a token uses, not of all: 2 of 5."""
    tokens = torch.zeros(4, 16, dtype=torch.int64)

    def flops(top_k: int) -> float:
        built = trace_facts(
            lambda: small(top_k=top_k), tokens, kernels=kernels, element_bytes=4,
            loss=balanced_loss, targets=tokens,
        )  # fmt: skip
        return next(unit for unit in built.units if unit.name == "blocks").forward_flops

    per_expert = 2 * 3 * 32 * 48 * 16
    assert flops(2) - flops(1) == pytest.approx(per_expert, rel=0.02)


@pytest.mark.parametrize("counts_may_be_asked_for", [False, True])
def test_a_recorded_graph_has_no_loads_that_nobody_counted(counts_may_be_asked_for: bool) -> None:
    """With even loads, as plans have them, it would be silently wrong on any data."""
    made, x = mixture(wide=20.0)
    weights = dict(made.named_parameters())

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(made, weights, (x,))[0]

    if counts_may_be_asked_for:  # sizes become unknowns, which each run works out
        graph = make_fx(run, tracing_mode="fake", pre_dispatch=True)(weights, x)
        torch.testing.assert_close(graph(weights, x.flip(0).exp()), made(x.flip(0).exp())[0])
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        shapes = {name: fakes.from_tensor(p) for name, p in weights.items()}, fakes.from_tensor(x)
    recorded = make_fx(run, tracing_mode="fake", pre_dispatch=True)
    with pytest.raises(DataDependentOutputException):
        recorded(*shapes)
