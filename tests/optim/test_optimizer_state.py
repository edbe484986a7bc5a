"""State by name when ranks hold pieces: what is a piece, what is whole, records joined and split."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.optim.lamb import LAMB
from shoal.optim.named_state import (
    group_settings,
    list_changed_settings,
    merge_records,
    sliced_keys,
    split_state,
)
from shoal.optim.restore_state import (
    check_optimizer_class,
    restore_group_settings,
    restore_optimizer_state,
)


def stepped(make, *shapes: tuple[int, ...]):
    params = [nn.Parameter(torch.randn(s)) for s in shapes]
    optimizer = make(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(
    ("make", "shapes", "keys"),
    [
        (torch.optim.AdamW, [(4, 3), (3,), ()], {"exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, [(1,), (5,)], {"exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, [()], {"exp_avg", "exp_avg_sq"}),
        (LAMB, [(4, 3)], {"exp_avg", "exp_avg_sq"}),
        (torch.optim.NAdam, [(4, 3), ()], {"exp_avg", "exp_avg_sq"}),
        (torch.optim.ASGD, [(4, 3), ()], {"ax"}),
        (torch.optim.Adafactor, [(4, 3), (3,)], {"variance"}),
        (torch.optim.Adafactor, [(4, 3), (4, 1), (3,)], {"variance"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), [(4, 3)], set()),
    ],
)
def test_which_keys_are_cut_like_their_parameter(make, shapes, keys: set[str]) -> None:
    assert sliced_keys(stepped(make, *shapes)[1]) == keys


def test_pieces_of_two_ranks_are_one_state_on_any_other_layout() -> None:
    """Saved from two ranks' flat pieces, joined whole and joined in other pieces: the same numbers."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6, 4).to(torch.float64))
    gradient = torch.randn(6, 4, dtype=torch.float64)
    reference = torch.optim.AdamW([whole], lr=0.1, fused=True)
    saved: dict[str, torch.Tensor] = {}
    records = []
    for low, high in ((0, 7), (7, 24)):
        piece = nn.Parameter(whole.detach().flatten()[low:high].clone())
        optimizer = torch.optim.AdamW([piece], lr=0.1, fused=True)
        piece.grad = gradient.flatten()[low:high].clone()
        optimizer.step()
        tensors, record = split_state(optimizer, {piece: "w"})
        records.append(record)
        for full, value in tensors.items():
            if full.rpartition(".")[2] in record["sliced"]:
                saved.setdefault(full, torch.zeros(24, dtype=torch.float64))[low:high] = value
            else:
                saved[full] = value
    merged = merge_records(records)
    whole.grad = gradient.clone()
    reference.step()
    joined = torch.optim.AdamW([whole], lr=0.1, fused=True)
    assert restore_optimizer_state(joined, {"w": whole}, saved, merged) == []
    for key, value in reference.state[whole].items():
        assert joined.state[whole][key].shape == value.shape
        torch.testing.assert_close(joined.state[whole][key], value, rtol=1e-15, atol=1e-15)
    rows = nn.Parameter(whole.detach()[2:5].clone())
    third = torch.optim.AdamW([rows], lr=0.1, fused=True)
    cut = {n: t.view(6, 4)[2:5] if t.ndim else t for n, t in saved.items()}
    restore_optimizer_state(third, {"w": rows}, cut, merged)
    assert third.state[rows]["exp_avg"].shape == (3, 4)
    rows.grad = torch.ones_like(rows)
    third.step()


def test_a_0_dim_parameters_state_fits_its_piece() -> None:
    (tau, _), optimizer = stepped(torch.optim.AdamW, (), (2,))
    tensors, record = split_state(optimizer, {p: f"p{i}" for i, p in enumerate(optimizer.state)})
    piece = nn.Parameter(tau.detach().reshape(1))
    other = torch.optim.AdamW([piece])
    restore_optimizer_state(other, {"p0": piece}, tensors, record)
    assert other.state[piece]["exp_avg"].shape == (1,)
    assert other.state[piece]["step"].shape == ()
    piece.grad = torch.ones(1)
    other.step()


def test_records_of_ranks_are_merged() -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one = torch.optim.SGD([{"params": [a, b]}, {"params": [], "lr": 0.5}], lr=0.1)
    two = torch.optim.SGD([{"params": [b]}, {"params": [c], "lr": 0.5}], lr=0.1, momentum=0.9)
    one.state[a]["calls"] = 3
    two.state[c]["calls"] = 4
    two.state[c]["buffer"] = torch.ones(2)
    names = {a: "a", b: "b", c: "c"}
    merged = merge_records([split_state(one, names)[1], split_state(two, names)[1]])
    assert merged["scalars"] == {"a": {"calls": 3}, "c": {"calls": 4}}
    assert merged["sliced"] == ["buffer"]
    assert [g["names"] for g in merged["groups"]] == [["a", "b"], ["c"]]
    assert [g["lr"] for g in merged["groups"]] == [0.1, 0.5]
    check_optimizer_class(one, merged)


def test_learning_rates_come_back_also_where_a_group_is_empty() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    record = {
        "groups": [
            {"names": ["b"], "lr": 0.3, "initial_lr": 0.9},
            {"names": ["a"], "lr": 0.2},
            {"names": ["c"], "lr": 0.1},
        ]
    }
    optimizer = torch.optim.SGD(
        [{"params": [a]}, {"params": [b], "lr": torch.tensor(1.0)}, {"params": []}], lr=1.0
    )
    restore_group_settings(optimizer, {a: "a", b: "b"}, record)
    assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx([0.2, 0.3, 0.1])
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)
    assert optimizer.param_groups[1]["initial_lr"] == 0.9


def cycled(betas: tuple[float, float] = (0.9, 0.999)) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimizer as a script makes it."""
    a = nn.Parameter(torch.ones(2))
    return torch.optim.AdamW([a], lr=0.1, betas=betas, weight_decay=0.5), a


def test_what_a_run_changed_comes_back_and_what_it_did_not_is_the_scripts() -> None:
    """OneCycleLR changes betas; the next start's script says another weight decay."""
    optimizer, a = cycled()
    start = group_settings(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    record = split_state(optimizer, {a: "a"})[1]
    record["changed"] = list_changed_settings(optimizer, start)
    record = json.loads(json.dumps(record))
    kept = optimizer.param_groups[0]
    assert kept["betas"] != (0.9, 0.999)
    again, b = cycled()
    again.param_groups[0]["weight_decay"] = 0.25
    restore_group_settings(again, {b: "a"}, record)
    now = again.param_groups[0]
    assert (now["betas"], now["lr"], now["max_momentum"]) == (
        kept["betas"],
        kept["lr"],
        kept["max_momentum"],
    )
    assert (type(now["betas"]), now["weight_decay"]) == (tuple, 0.25)
    assert list_changed_settings(again, start)[0].count("betas") == 1


def test_a_checkpoint_that_does_not_say_what_changed_brings_back_what_cycles() -> None:
    optimizer, a = cycled((0.7, 0.99))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    record = split_state(optimizer, {a: "a"})[1]
    again, b = cycled()
    restore_group_settings(again, {b: "a"}, record)
    assert again.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    plain, a = cycled((0.7, 0.99))
    record = split_state(plain, {a: "a"})[1]
    restore_group_settings(again, {b: "a"}, record)
    assert again.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"], "as the script has"


def test_memory_format_of_whole_parameters_comes_back() -> None:
    p = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.randn_like(p)
    optimizer.step()
    tensors, record = split_state(optimizer, {p: "w"})
    plain = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    restore_optimizer_state(optimizer, {"w": p}, plain, record)
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    assert torch.equal(optimizer.state[p]["exp_avg"], plain["w.exp_avg"])


def test_state_that_cannot_be_saved_is_named() -> None:
    (p,), optimizer = stepped(torch.optim.AdamW, (2,))
    optimizer.state[p]["history"] = [1, 2]
    with pytest.raises(ConfigError, match="AdamW keeps history of w as list; tensors and numbers"):
        split_state(optimizer, {p: "w"})
