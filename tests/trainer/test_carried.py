"""A state that a model carries from batch to batch is told from tables, counters of its own and outputs kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.trainer.guards.guard import Guards
from shoal.trainer.guards.hidden_state import HiddenStateGuard


class Keeps(nn.Module):
    """A layer, and whatever a test wants it to keep."""

    def __init__(self, act: Callable[[Keeps, torch.Tensor], torch.Tensor], **held: Any) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), act
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, self.layer(x))


def told(module: nn.Module, *, ranks: int = 2, micro_batches: int = 1) -> list[str]:
    """The lines after three steps."""
    plan = Plan(Layout(dp_replicate=2))
    program = SimpleNamespace(module=module, plan=plan, data=SimpleNamespace(size=ranks))
    lines: list[str] = []
    carried = HiddenStateGuard(cast("Any", program), lines.append)
    guards = Guards([carried])
    for step in (1, 2, 3):
        with guards.around(step, micro_batches):
            for _ in range(micro_batches):
                module(torch.randn(2, 4)).sum().backward()
    return lines


def recurrent(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.state = (x.detach() + module.state[0], x.detach())
    return x + module.state[0]


def moving_mean(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.mean.mul_(0.9).add_(0.1 * x.detach().mean())
    return x - module.mean


def optional(module: Any, x: torch.Tensor) -> torch.Tensor:
    out = x if module.last is None else x + module.last
    module.last = out.detach()
    return out


ZERO = torch.zeros(2, 4)
CARRIED = {
    "a pair": (lambda: Keeps(recurrent, state=(ZERO, ZERO)), "state[0]"),
    "in place": (lambda: Keeps(moving_mean, mean=torch.zeros(())), "mean"),
    "from nothing": (lambda: nn.Sequential(Keeps(optional, last=None)), "0.last"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_state_is_named(name: str) -> None:
    build, where = CARRIED[name]
    (line,) = told(build())
    assert line.startswith(
        f"model: {where} is computed in one pass and read in the next: every rank carries its own "
        "from batch to batch, every micro-batch meets the one before it, and no checkpoint has it; "
        "try: begin each forward pass with a fresh one, or bring it with the batch"
    )
    assert told(build(), ranks=1, micro_batches=2) == [line]
    assert told(build(), ranks=1) == [], "one process, whole batches: what was written is meant"


def kept(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.last = x.detach()
    return x * module.last.shape[0]


def table(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.angles is None or len(module.angles) < x.shape[1]:
        module.angles = torch.arange(x.shape[1]).float()
    return x + module.angles


def fresh(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.state = torch.zeros(4)
    for _ in range(3):
        module.state = module.state + x.detach().mean(0)
    return x + module.state


LEFT_ALONE = {
    "an output that is kept": lambda: Keeps(kept, last=None),
    "a table made in the first pass": lambda: Keeps(table, angles=None),
    "a state made anew in every pass": lambda: Keeps(fresh, state=None),
    "a constant": lambda: Keeps(lambda m, x: x * m.scale, scale=torch.ones(4)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_state_is_left_alone(name: str) -> None:
    assert told(LEFT_ALONE[name]()) == []


def draws_by_torch(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=module.drawn)


def draws_by_numpy(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x + float(module.drawn.random())


GENERATORS = {
    "torch": (draws_by_torch, torch.Generator),
    "numpy": (draws_by_numpy, np.random.default_rng),
    "older numpy": (draws_by_numpy, np.random.RandomState),
    "python": (draws_by_numpy, random.Random),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_model_is_named_if_a_pass_draws_from_it(name: str) -> None:
    act, build = GENERATORS[name]
    (line,) = told(Keeps(act, drawn=build()))
    assert "the forward pass draws from drawn, a generator of its own" in line
    assert told(Keeps(lambda module, x: x, drawn=build())) == []
