"""Optimizers by name: what `[optimizer]` gives, decay groups, and wrong names in one line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.optim.build import build_optimizer


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1))
    return list(net.parameters())


def built(name: str, **settings) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerPolicy(name=name, **settings), parameters())


def test_adamw_is_fused_with_the_sections_settings() -> None:
    optimizer = built("adamw", lr=0.02, betas=(0.8, 0.9))
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["fused"]) == (0.02, (0.8, 0.9), True)


def test_sgd_has_momentum() -> None:
    optimizer = built("SGD", momentum=0.7)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert built("rmsprop").param_groups[0]["momentum"] == 0


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "nadam", "torch.optim:RAdam"])
def test_decay_acts_on_matrices_only(name: str) -> None:
    optimizer = built(name, weight_decay=0.3)
    matrices, vectors = optimizer.param_groups
    assert matrices["weight_decay"] == 0.3
    assert vectors["weight_decay"] == 0.0
    assert {p.ndim for p in matrices["params"]} == {2, 3}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 6


def test_a_group_that_would_be_empty_is_left_out() -> None:
    optimizer = build_optimizer(OptimizerPolicy(), [nn.Parameter(torch.ones(3))])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0]


DENSE = (
    "adadelta adafactor adagrad adam adamax adamw asgd lamb lion muon nadam radam rmsprop rprop sgd "
    "torch.optim:Adam torch.optim.adamw:AdamW"
)


@pytest.mark.parametrize("name", DENSE.split())
def test_every_named_optimizer_takes_a_step(name: str) -> None:
    optimizer = built(name)
    before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adam_w", "optimizer.name = adam_w: no such optimizer; try: adamw"),
        ("best", "optimizer.name = best: no such optimizer; there are adadelta, adafac"),
        ("optimizer", "optimizer.name = optimizer: no such optimizer"),
        ("sparseadam", "optimizer.name = sparseadam: no such optimizer; try: "),
        ("lbfgs", "optimizer: LBFGS evaluates the model itself through a closure"),
        ("torch.optim:LBFGS", "optimizer: LBFGS evaluates the model itself through a closure"),
        ("torch.optim:Lion", "optimizer.name = torch.optim:Lion: does not import: module"),
        ("nowhere.at:All", "optimizer.name = nowhere.at:All: does not import: No module named"),
        (":Adam", "optimizer.name = :Adam: does not import: "),
        ("json:dumps", "optimizer.name = json:dumps: is no subclass of torch.optim.Optimizer"),
        ("collections:OrderedDict", "is no subclass of torch.optim.Optimizer; try: adamw"),
        ("torch.optim:Muon", "optimizer.name = torch.optim:Muon: Muon only supports 2D parameters"),
    ],
)
def test_wrong_names_are_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as failure:
        built(name)
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)


def test_settings_that_a_class_refuses_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer.name = adamw: Invalid learning rate: -1"):
        built("adamw", lr=-1.0)
