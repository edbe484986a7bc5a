"""Drawn runs against closed forms, against a slow simulation second by second, and against a clock."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from shoal.base.errors import PlanError
from shoal.teach.failure_timeline import (
    FailureCase,
    erlang_b,
    expected_goodput,
    least_spares,
    simulate_failures,
    simulate_intervals,
    waiting_share,
)

HOUR = 3600.0
LLAMA = FailureCase(16_384, 3.1 * HOUR * 16_384, 1140, 60, 600)


def spread_of(case: FailureCase, duration_s: float, runs: int = 12) -> tuple[float, float]:
    """Mean goodput of drawn runs, and the standard error of that mean."""
    shares = [simulate_failures(case, duration_s, seed).goodput for seed in range(runs)]
    mean = sum(shares) / runs
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / (runs - 1))
    return mean, deviation / math.sqrt(runs)


CASES = {
    "as published": LLAMA,
    "long stalls": replace(LLAMA, stall_s=400),
    "failures during restarts": replace(LLAMA, restart_s=9000),
    "slow disks": replace(LLAMA, write_s=900),
    "hardly gets through": replace(LLAMA, interval_s=3 * 11160, write_s=2 * 11160),
    "few spares": replace(LLAMA, spares=5, repair_s=24 * HOUR, node_share=0.78),
    "no spares": replace(LLAMA, spares=0, repair_s=2 * HOUR),
    "100 000 devices": replace(LLAMA, devices=100_000, interval_s=300),
}


@pytest.mark.parametrize("name", CASES)
def test_drawn_and_computed_agree(name: str) -> None:
    """Within four standard errors, and those are below 1 %: neither form is an approximation."""
    case = CASES[name]
    mean, error = spread_of(case, 1500 * case.mean_s)
    expected = expected_goodput(case)
    assert abs(mean - expected) < 4 * error + 2e-4
    assert error < 0.01


def test_waiting_does_not_depend_on_how_repairs_are_spread() -> None:
    """Erlang's B needs only the mean of a repair: here all repairs take equally long."""
    case = replace(LLAMA, spares=3, repair_s=12 * HOUR)
    run = simulate_failures(case, 20_000 * case.mean_s)
    assert run.waiting_s / run.duration_s == pytest.approx(waiting_share(case), rel=0.05)


def second_by_second(case: FailureCase, duration_s: int, seed: int) -> int:
    """Saved work of a run that asks in every second whether a device fails."""
    draw = random.Random(seed)
    saved = position = stalling = down = 0
    pending: list[tuple[int, int]] = []
    for now in range(duration_s):
        if draw.random() < 1 / case.mean_s:
            position, stalling, down, pending = saved, 0, int(case.restart_s), []
            continue
        while pending and pending[0][0] <= now:
            saved = pending.pop(0)[1]
        if down:
            down -= 1
        elif stalling:
            stalling -= 1
            if not stalling:
                pending.append((now + 1 + int(case.write_s), position))
        else:
            position += 1
            if position % int(case.interval_s) == 0:
                stalling = int(case.stall_s)
    return saved


def test_a_simulation_second_by_second_agrees() -> None:
    case = FailureCase(10, 10 * 500.0, 60, 7, 25, write_s=20)
    duration_s = 400_000
    slow = sum(second_by_second(case, duration_s, seed) for seed in range(2)) / 2 / duration_s
    assert slow == pytest.approx(expected_goodput(case), rel=0.02)
    assert spread_of(case, duration_s, 4)[0] == pytest.approx(slow, rel=0.03)


def test_parts_add_up_and_seeds_repeat() -> None:
    case = replace(LLAMA, spares=2, repair_s=6 * HOUR, write_s=60)
    run = simulate_failures(case, 54 * 86400.0, seed=3)
    parts = run.work_s + run.checkpoint_s + run.repeated_s + run.restart_s + run.waiting_s
    assert parts == pytest.approx(run.duration_s)
    assert min(run.work_s, run.checkpoint_s, run.repeated_s, run.restart_s, run.waiting_s) > 0
    assert run == simulate_failures(case, 54 * 86400.0, seed=3)
    assert run != simulate_failures(case, 54 * 86400.0, seed=4)


def test_bursts_are_kinder_than_chance() -> None:
    """Failures that come together hit the same restart: with the same mean less is lost."""
    even, _ = spread_of(LLAMA, 3000 * LLAMA.mean_s, 6)
    bursts, _ = spread_of(replace(LLAMA, shape=0.7), 3000 * LLAMA.mean_s, 6)
    assert bursts > even + 0.005


def test_stretches_follow_each_other() -> None:
    last = 0.0
    for piece in simulate_intervals(replace(LLAMA, spares=1, repair_s=8 * HOUR), 30 * 86400.0, 1):
        assert piece.start_s == last
        assert piece.start_s <= piece.up_s <= piece.run_s <= piece.end_s
        last = piece.end_s
    assert last == 30 * 86400.0


def test_erlang_b_is_the_truncated_poisson_share() -> None:
    for servers, load in ((1, 0.3), (4, 2.5), (30, 28.0)):
        terms = [load**k / math.factorial(k) for k in range(servers + 1)]
        assert erlang_b(servers, load) == pytest.approx(terms[-1] / sum(terms))


def test_spares_for_a_share_are_enough_and_one_fewer_is_not() -> None:
    case = replace(LLAMA, repair_s=24 * HOUR)
    enough = least_spares(case, 0.01)
    assert waiting_share(replace(case, spares=enough)) <= 0.01
    assert waiting_share(replace(case, spares=enough - 1)) > 0.01


def test_100_000_devices_for_half_a_year_take_less_than_a_second() -> None:
    case = FailureCase(100_000, 50_000 * HOUR, 400, 10, 300, spares=80, repair_s=24 * HOUR)
    began = time.process_time()
    run = simulate_failures(case, 180 * 86400.0)
    assert run.failures > 7000
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"interval_s": 0.0}, "interval_s"),
        ({"device_mtbf_s": 0.0}, "device_mtbf_s"),
        ({"write_s": 2000.0}, "write_s"),
        ({"spares": -1}, "spares"),
        ({"node_share": 1.5}, "node_share"),
        ({"shape": 0.0}, "shape"),
        ({"devices": 0}, "gpus"),
    ],
)
def test_cases_without_meaning_are_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(PlanError, match=f"{named}.*try: "):
        replace(LLAMA, **change)


def test_no_run_of_no_time_and_none_of_millions_of_failures() -> None:
    for duration_s in (0.0, 1e30):
        with pytest.raises(PlanError, match="duration_s.*try: "):
            simulate_failures(LLAMA, duration_s)
    with pytest.raises(PlanError, match="share.*try: "):
        least_spares(LLAMA, 1.0)
