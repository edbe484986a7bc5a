"""Pieces in the place of parameters: the same steps, the same object, state that comes along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.errors import BugError, PlanError
from shoal.optim.lion import Lion
from shoal.optim.muon import MuonWithAdamW
from shoal.optim.sharded_optimizer import shard_optimizer

SHAPES = {"w": (6, 5), "b": (6,), "tau": ()}


def named() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def give_gradients(tensors, number: int) -> None:
    for place, t in enumerate(tensors):
        generator = torch.Generator().manual_seed(10 * number + place)
        t.grad = torch.randn(t.shape, generator=generator)


def flat_pieces(whole: dict[str, nn.Parameter], start: int, stop: int):
    """1-D views of one flat buffer, and where each came from."""
    buffer = torch.cat([p.detach().flatten() for p in whole.values()])
    local, spans, at = {}, {}, 0
    for p in whole.values():
        low, high = max(start, at), min(stop, at + p.numel())
        local[p] = nn.Parameter(buffer[low:high]) if low < high else None
        spans[p] = (low - at, high - at)
        at += p.numel()
    return local, lambda p, t: t.flatten()[spans[p][0] : spans[p][1]]


MAKES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "lion": lambda groups: Lion(groups, lr=0.1),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("span", [(0, 17), (17, 37), (36, 37)])
def test_pieces_go_on_where_wholes_were(make: str, span: tuple[int, int]) -> None:
    """Two steps whole, then two on pieces: what four steps on wholes give, bit for bit."""
    whole, twin = named(), named()
    reference, optimizer = (
        MAKES[make]([{"params": [p["w"]]}, {"params": [p["b"], p["tau"]], "lr": 0.2}])
        for p in (twin, whole)
    )
    for step in (0, 1):
        give_gradients(whole.values(), step)
        give_gradients(twin.values(), step)
        optimizer.step()
        reference.step()
    local, cut = flat_pieces(whole, *span)
    shard_optimizer(optimizer, local, cut)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
    for step in (2, 3):
        give_gradients(twin.values(), step)
        for (p, piece), t in zip(local.items(), twin.values(), strict=True):
            if piece is not None:
                piece.grad = cut(p, t.grad).clone()
        optimizer.step()
        reference.step()
    for (p, piece), t in zip(local.items(), twin.values(), strict=True):
        if piece is None:
            continue
        assert torch.equal(piece.detach(), cut(p, t.detach()))
        for key, value in reference.state[t].items():
            kept = optimizer.state[piece][key]
            if kept.shape == piece.shape:
                value = cut(p, value)
            assert torch.equal(kept, value), key
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in local.values() if p is not None}
    assert {id(p) for p in optimizer.state} == {id(p) for p in held}


def test_groups_stay_when_empty_and_schedulers_go_on() -> None:
    whole = named()
    optimizer = torch.optim.AdamW([{"params": [p]} for p in whole.values()], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    piece = nn.Parameter(whole["b"].detach()[:2])
    lists = [g["params"] for g in optimizer.param_groups]
    shard_optimizer(
        optimizer, {whole["w"]: None, whole["b"]: piece, whole["tau"]: None}, lambda p, t: t
    )
    assert [len(members) for members in lists] == [0, 1, 0]
    assert all(g["params"] is held for g, held in zip(optimizer.param_groups, lists, strict=True))
    piece.grad = torch.ones(2)
    before = piece.detach().clone()
    optimizer.step()
    schedule.step()
    assert not torch.equal(piece.detach(), before)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5] * 3


def test_names_of_named_parameters_run_along() -> None:
    whole = named()
    optimizer = torch.optim.SGD(whole.items(), lr=0.1)
    shard_optimizer(optimizer, {whole["w"]: None, whole["b"]: whole["b"], whole["tau"]: None}, None)
    assert optimizer.param_groups[0]["param_names"] == ["b"]


def test_a_0_dim_parameters_moments_are_cut_and_its_step_is_not() -> None:
    tau = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW([tau], lr=0.1, fused=True)
    tau.grad = torch.tensor(1.0)
    optimizer.step()
    piece = nn.Parameter(tau.detach().reshape(1))
    shard_optimizer(optimizer, {tau: piece}, lambda p, t: t)
    assert optimizer.state[piece]["step"].shape == ()
    assert optimizer.state[piece]["exp_avg"].shape == (1,)
    piece.grad = torch.ones(1)
    optimizer.step()


def test_owners_take_factored_state_whole() -> None:
    whole = named()
    optimizer = torch.optim.Adafactor(whole.values())
    give_gradients(whole.values(), 0)
    optimizer.step()
    rows = optimizer.state[whole["w"]]["row_var"]
    owned = nn.Parameter(whole["w"].detach().clone())
    shard_optimizer(optimizer, {whole["w"]: owned, whole["b"]: None, whole["tau"]: None}, None)
    assert optimizer.state[owned]["row_var"] is rows
    assert list(optimizer.state) == [owned]


def test_muon_and_its_inner_optimizers_follow() -> None:
    whole = named()
    optimizer = MuonWithAdamW(whole.values(), lr=0.1)
    give_gradients(whole.values(), 0)
    optimizer.step()
    owned = nn.Parameter(whole["w"].detach().clone())
    shard_optimizer(
        optimizer, {whole["w"]: owned, whole["b"]: None, whole["tau"]: None}, lambda p, t: t
    )
    before = owned.detach().clone()
    owned.grad = torch.ones_like(owned)
    optimizer.step()
    assert not torch.equal(owned.detach(), before)
    assert list(optimizer.state) == [owned]


def test_what_cannot_be_cut_is_one_line_and_changes_nothing() -> None:
    whole = named()
    optimizer = torch.optim.Adafactor(whole.values())
    give_gradients(whole.values(), 0)
    optimizer.step()
    local, cut = flat_pieces(whole, 0, 17)
    with pytest.raises(PlanError) as failure:
        shard_optimizer(optimizer, local, cut)
    assert str(failure.value) == (
        "optimizer: Adafactor has stepped already and keeps row_var of shape [6, 1] for a parameter "
        "of shape [6, 5], which cannot be cut with it; hand over an optimizer that has not stepped; "
        "try: layout ddp"
    )
    assert optimizer.param_groups[0]["params"] == list(whole.values())
    assert set(optimizer.state) == set(whole.values())


def test_a_trainable_parameter_without_a_piece_is_our_bug_a_frozen_one_is_not() -> None:
    whole = named()
    optimizer = torch.optim.SGD(whole.values(), lr=0.1)
    with pytest.raises(BugError, match=r"no piece for a trainable parameter, place 1, shape \[6\]"):
        shard_optimizer(optimizer, {whole["w"]: None}, None)
    whole["b"].requires_grad_(False)
    whole["tau"].requires_grad_(False)
    shard_optimizer(optimizer, {whole["w"]: None}, None)
    assert optimizer.param_groups[0]["params"] == [whole["b"], whole["tau"]]
