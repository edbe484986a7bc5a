"""Schedules: values where they matter, never 0 at the start, and nothing but a function of step."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.base.layouts.policies import SCHEDULES, OptimizerPolicy
from shoal.optim.schedule import lr_factor, warmup_steps

TOTAL, WARM = 100, 10


def factors(schedule: str, total: int = TOTAL, warm: int = WARM) -> list[float]:
    policy = OptimizerPolicy(schedule=schedule, warmup_steps=warm)
    return [lr_factor(policy, step, total) for step in range(total)]


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.5, 1 / 90),
        ("cosine", 0.55, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90))),
        ("wsd", 1.0, (1 / 90) / 0.2),
    ],
)
def test_values_with_warmup(schedule: str, middle: float, last: float) -> None:
    values = factors(schedule)
    assert values[0] == pytest.approx(0.1)
    assert values[4] == pytest.approx(0.5)
    assert values[9] == 1.0
    assert values[10] == 1.0
    assert values[55] == pytest.approx(middle)
    assert values[99] == pytest.approx(last)


def test_one_cycle() -> None:
    values = factors("one-cycle", 101)
    assert values[0] == pytest.approx(1 / 25)
    assert values[30] == pytest.approx(1.0)
    assert max(values) == values[30]
    assert values[15] == pytest.approx((1 / 25 + 1) / 2)
    assert values[65] == pytest.approx((1 + 1e-4) / 2)
    assert values[100] == pytest.approx(1e-4)
    assert sorted(values[:31]) == values[:31]
    assert sorted(values[30:], reverse=True) == values[30:]


def test_wsd_falls_over_the_last_fifth_only() -> None:
    values = factors("wsd")
    assert set(values[10:82]) == {1.0}
    assert values[83] < 1.0
    steps = [a - b for a, b in zip(values[83:], values[84:], strict=False)]
    assert max(steps) == pytest.approx(min(steps))


def test_cosine_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL - WARM, eta_min=0.1)
    for value in factors("cosine")[WARM:]:
        assert value == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        plain.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("total", "warm"), [(100, 10), (100, 0), (1, -1), (2, 1), (3, 10), (7, -1)]
)
def test_every_step_of_a_run_has_a_rate(schedule: str, total: int, warm: int) -> None:
    """Never 0, never above the peak, at any step of a run of any length."""
    values = factors(schedule, total, warm)
    assert all(0.0 < value <= 1.0 for value in values)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pure_function_of_the_step(schedule: str) -> None:
    """Asked in any order, from anywhere, the answer is the same: that is why resume is exact."""
    values = factors(schedule)
    policy = OptimizerPolicy(schedule=schedule, warmup_steps=WARM)
    for step in (99, 0, 41, 41, 7):
        assert lr_factor(policy, step, TOTAL) == values[step]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beyond_the_end_nothing_rises(schedule: str) -> None:
    policy = OptimizerPolicy(schedule=schedule, warmup_steps=WARM)
    end = lr_factor(policy, TOTAL - 1, TOTAL)
    assert lr_factor(policy, TOTAL + 50, TOTAL) <= end


def test_warmup_is_given_or_a_tenth() -> None:
    assert warmup_steps(OptimizerPolicy(), 200) == 20
    assert warmup_steps(OptimizerPolicy(), 5) == 1
    assert warmup_steps(OptimizerPolicy(warmup_steps=0), 200) == 0
    assert warmup_steps(OptimizerPolicy(warmup_steps=7), 5) == 7
