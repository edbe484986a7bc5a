"""Lion, LAMB and Muon-with-AdamW: against their formulas and torch's own, by name and with state."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn

from shoal.base.errors import CheckpointError
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.optim.build import build_optimizer
from shoal.optim.lamb import LAMB
from shoal.optim.lion import Lion
from shoal.optim.muon import MuonWithAdamW, hidden_matrices
from shoal.optim.named_state import split_state
from shoal.optim.restore_state import check_optimizer_class, restore_optimizer_state


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [nn.Parameter(t) for t in drawn]


def gradients(params: list[nn.Parameter], step: int) -> None:
    for p, g in zip(params, tensors(*(tuple(p.shape) for p in params), seed=9 + step), strict=True):
        p.grad = g.detach()


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_the_papers_algorithm(maximize: bool) -> None:
    params = tensors((4, 3), (3,))
    want = [p.detach().clone() for p in params]
    memory = [torch.zeros_like(p) for p in want]
    optimizer = Lion(params, lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, maximize=maximize)
    for step in range(4):
        gradients(params, step)
        for w, m, p in zip(want, memory, params, strict=True):
            g = -p.grad if maximize else p.grad
            w -= 0.02 * (torch.sign(0.8 * m + 0.2 * g) + 0.3 * w)
            m.copy_(0.95 * m + 0.05 * g)
        optimizer.step()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("clamp", [None, (0.5, 2.0)])
def test_lamb_is_the_papers_algorithm(clamp: tuple[float, float] | None) -> None:
    params = tensors((4, 3), (3,))
    want = [p.detach().clone() for p in params]
    first, second = [torch.zeros_like(p) for p in want], [torch.zeros_like(p) for p in want]
    optimizer = LAMB(params, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, norm_clamp=clamp)
    for step in range(1, 5):
        gradients(params, step)
        for w, m, v, p in zip(want, first, second, params, strict=True):
            m.copy_(0.8 * m + 0.2 * p.grad)
            v.copy_(0.9 * v + 0.1 * p.grad**2)
            r = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6) + 0.3 * w
            phi = (
                float(w.norm()) if clamp is None else min(max(float(w.norm()), clamp[0]), clamp[1])
            )
            w -= 0.1 * (phi / float(r.norm()) if w.ndim == 2 else 1.0) * r
        optimizer.step()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [Lion, LAMB])
def test_handfuls_miss_nobody(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in small handfuls are steps of all at once, also past a parameter without gradient."""
    shapes = [(3,), (2, 2), (9,), (1,), (1,), (5,)]
    once, often = tensors(*shapes), tensors(*shapes)
    for params, elements in ((once, 2**16), (often, 6)):
        monkeypatch.setattr("shoal.optim.lion.HANDFUL_CPU", elements)
        optimizer = kind(params, lr=0.1)
        gradients(params, 0)
        params[3].grad = None
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(once, often, strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(once, tensors(*shapes), strict=True)]
    assert moved == [True, True, True, False, True, True]


def test_lamb_starts_from_zero_weights() -> None:
    zero = nn.Parameter(torch.zeros(2, 2))
    still = nn.Parameter(torch.ones(2, 2))
    optimizer = LAMB([zero, still], lr=0.1, weight_decay=0.0)
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert torch.allclose(zero.detach(), torch.full((2, 2), -0.1), atol=1e-5)
    assert torch.equal(still.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("kind", [Lion, LAMB, MuonWithAdamW])
def test_parameters_without_gradient_rest_and_closures_run(kind) -> None:
    used, rested = tensors((3, 3), (3, 3))
    before = rested.detach().clone()
    optimizer = kind([used, rested], lr=torch.tensor(0.1))

    def closure():
        optimizer.zero_grad()
        loss = used.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert torch.equal(rested.detach(), before)
    assert list(optimizer.state) == [used]


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Lion, {"lr": -1.0}, "lr = -1.0: a learning rate is 0 or more"),
        (Lion, {"betas": (0.9, 1.0)}, "betas[1] = 1.0: wanted 0 ≤ beta < 1"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay = -0.1: wanted 0 or more"),
        (LAMB, {"norm_clamp": (2.0, 1.0)}, "norm_clamp = (2.0, 1.0): wanted 0 ≤ low < high"),
    ],
)
def test_settings_out_of_range(kind, settings, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        kind(tensors((2, 2)), **settings)


def test_sparse_gradients_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="Lion takes dense real gradients, got a sparse one"):
        Lion([parameter]).step()


def mixed_and_apart(lr: float = 0.05):
    """One MuonWithAdamW beside torch's two, over equal parameters."""
    ours, theirs = (
        tensors((6, 4), (4,), (5, 3), (2, 2, 2)),
        tensors((6, 4), (4,), (5, 3), (2, 2, 2)),
    )
    one = MuonWithAdamW(
        [{"params": ours[:2]}, {"params": ours[2:], "weight_decay": 0.0}], lr=lr, weight_decay=0.2
    )
    muon = torch.optim.Muon(
        [{"params": theirs[:1], "weight_decay": 0.2}, {"params": theirs[2:3], "weight_decay": 0.0}],
        lr=lr,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [{"params": theirs[1:2], "weight_decay": 0.2}, {"params": theirs[3:], "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    return ours, theirs, one, (muon, adamw)


def test_muon_with_adamw_is_torchs_two_under_one_schedule() -> None:
    ours, theirs, one, both = mixed_and_apart()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (one, *both)]
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for optimizer in (one, *both):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert set(one.state) == set(ours)
    assert [g["rule"] for g in one.param_groups] == ["muon", "adamw"] * 2
    one.zero_grad()
    assert all(p.grad is None for p in ours)


def test_muon_with_adamw_goes_on_from_torchs_state_dict_and_from_ours() -> None:
    twins = [mixed_and_apart()[2] for _ in range(3)]
    members = [[p for g in one.param_groups for p in g["params"]] for one in twins]
    gradients(members[0], 0)
    twins[0].step()
    with torch.no_grad():
        for params in members[1:]:
            for a, b in zip(params, members[0], strict=True):
                a.copy_(b)
    twins[1].load_state_dict(copy.deepcopy(twins[0].state_dict()))
    tensors_then, record = split_state(twins[0], {p: f"p{i}" for i, p in enumerate(members[0])})
    copies = {name: t.clone() for name, t in tensors_then.items()}
    restore_optimizer_state(
        twins[2], {f"p{i}": p for i, p in enumerate(members[2])}, copies, record
    )
    for params, one in zip(members, twins, strict=True):
        gradients(params, 1)
        one.step()
    for params in members[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, members[0], strict=True))


def test_embeddings_and_heads_are_not_muons() -> None:
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    chosen = hidden_matrices(net)
    assert [n for n, p in net.named_parameters() if chosen(p)] == ["1.weight"]
    net[3].weight = net[0].weight  # a tied head
    chosen = hidden_matrices(net)
    assert [n for n, p in net.named_parameters() if chosen(p)] == ["1.weight"]
    policy = OptimizerPolicy(name="muon")
    told = build_optimizer(policy, list(net.parameters()), net)
    assert [g["rule"] for g in told.param_groups] == ["muon", "adamw", "adamw"]
    assert [g["weight_decay"] for g in told.param_groups] == [0.1, 0.1, 0.0]
    assert told.param_groups[0]["params"] == [net[1].weight]
    untold = build_optimizer(policy, list(net.parameters()))
    assert untold.param_groups[0]["params"] == [net[0].weight, net[1].weight]


def test_networks_without_matrices_or_with_nothing_else() -> None:
    for shapes in [((3,),), ((3, 3),)]:
        params = tensors(*shapes)
        optimizer = MuonWithAdamW(params, lr=0.1)
        gradients(params, 0)
        before = params[0].detach().clone()
        optimizer.step()
        assert not torch.equal(params[0].detach(), before)


@pytest.mark.parametrize("name", ["lion", "lamb", "muon"])
def test_own_names_learn(name: str) -> None:
    """A small regression falls to a fifth of its loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    policy = OptimizerPolicy(name=name, lr=0.02, weight_decay=0.01)
    optimizer = build_optimizer(policy, list(net.parameters()), net)
    assert all(g.get("betas", (0.9, 0.95)) == (0.9, 0.95) for g in optimizer.param_groups)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.2 * losses[0]


def test_the_checkpoints_class_is_named_as_in_the_configuration() -> None:
    optimizer = torch.optim.SGD(tensors((2,)))
    with pytest.raises(CheckpointError, match=r"MuonWithAdamW, .* try: optimizer.name=muon$"):
        check_optimizer_class(optimizer, {"class": "MuonWithAdamW"})
