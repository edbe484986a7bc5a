"""Islands on slow links against a step-by-step simulation and against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.base.errors import PlanError
from shoal.planner.islands import (
    IslandsCase,
    islands_cost,
    needed_bytes_per_s,
    smallest_period,
    utilisation_table,
)

PAPER = IslandsCase(2, 10e9, 0.8, 125e6, 100, wire_bits=16)


def round_by_steps(case: IslandsCase, rounds: int = 6) -> float:
    """Seconds per round of a program that steps, sends a fragment when its turn comes, and waits."""
    now, link_free = 0.0, 0.0
    waiting: list[tuple[int, float]] = []
    one_s = case.fragment_s()
    turns = {(p * case.period) // case.fragments for p in range(case.fragments)}
    starts = []
    for step in range(rounds * case.period + 1):
        for due, done in list(waiting):
            if step >= due:
                now = max(now, done)
                waiting.remove((due, done))
        if step % case.period == 0:
            starts.append(now)
            if step:
                now += case.outer_s
        if step % case.period in turns:
            begins = max(now, link_free)
            link_free = begins + one_s
            waiting.append((step + case.overlap_steps, link_free))
            if case.overlap_steps == 0:
                now = link_free
                waiting.pop()
        now += case.step_s
    return (starts[-1] - starts[1]) / (len(starts) - 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wire_bits": 4.0},
        {"fragments": 10},
        {"fragments": 10, "overlap_steps": 5},
        {"fragments": 10, "overlap_steps": 10},
        {"fragments": 20, "overlap_steps": 1, "wire_bits": 4.0},
        {"islands": 8, "latency_s": 0.1, "fragments": 4, "overlap_steps": 25},
        {"outer_s": 5.0},
        {"bytes_per_s": 12.5e9, "fragments": 5, "overlap_steps": 3},
    ],
)
def test_a_program_that_sends_and_waits_takes_as_long(changes: dict[str, float]) -> None:
    case = replace(PAPER, **changes)
    assert round_by_steps(case) == pytest.approx(islands_cost(case).round_s, rel=1e-9)


def test_the_smallest_period_is_enough_and_one_less_is_not() -> None:
    for case in (PAPER, replace(PAPER, fragments=5, overlap_steps=2), replace(PAPER, outer_s=3.0)):
        for target in (0.5, 0.95, 0.99):
            period = smallest_period(case, target)
            reached = islands_cost(replace(case, period=period)).utilisation
            assert reached >= target - 1e-9
            assert islands_cost(replace(case, period=period - 1)).utilisation < target


def test_a_period_holds_at_least_its_fragments() -> None:
    quick = replace(PAPER, bytes_per_s=1e15, fragments=10, overlap_steps=4)
    assert smallest_period(quick) == 40


def test_the_needed_link_is_enough_and_slower_is_not() -> None:
    for case in (PAPER, replace(PAPER, fragments=24, overlap_steps=1, latency_s=0.01)):
        link = needed_bytes_per_s(case, 0.9)
        assert islands_cost(replace(case, bytes_per_s=link)).utilisation == pytest.approx(0.9)
        slower = islands_cost(replace(case, bytes_per_s=0.9 * link)).utilisation
        assert slower < 0.9
    assert needed_bytes_per_s(replace(PAPER, latency_s=100.0), 0.99) == float("inf")


PUBLISHED_GBIT = {
    # (parameters, step_s): Gbit/s for 50, 80, 90, 95 % at H = 100 (Streaming DiLoCo, table of links)
    (10e9, 0.8): (1.7, 7.5, 16.0, 33.9),
    (100e9, 4.9): (3.0, 11.0, 23.3, 49.4),
}


@pytest.mark.parametrize(("model", "published"), PUBLISHED_GBIT.items())
def test_links_beside_the_published_simulation(
    model: tuple[float, float], published: tuple[float, ...]
) -> None:
    """Never less than the paper's figure, and at most 30 % more."""
    case = replace(PAPER, parameters=model[0], step_s=model[1])
    for target, gbit in zip((0.5, 0.8, 0.9, 0.95), published, strict=True):
        ours = needed_bytes_per_s(case, target) * 8e-9
        assert 1.0 <= ours / gbit <= 1.3


def test_four_bits_beside_one_step_as_published() -> None:
    case = replace(PAPER, wire_bits=4.0, fragments=24, overlap_steps=1)
    for target, gbit in zip((0.5, 0.8, 0.9, 0.95), (0.4, 0.9, 1.4, 1.4), strict=True):
        assert 0.9 <= needed_bytes_per_s(case, target) * 8e-9 / gbit <= 1.25


def test_fragments_smooth_the_rate_and_send_as_much() -> None:
    whole = islands_cost(replace(PAPER, overlap_steps=10))
    cut = islands_cost(replace(PAPER, overlap_steps=10, fragments=10))
    assert cut.sent_bytes == whole.sent_bytes
    assert cut.hiding_bytes_per_s == pytest.approx(whole.hiding_bytes_per_s / 10)
    hidden = replace(PAPER, overlap_steps=10, fragments=10, bytes_per_s=cut.hiding_bytes_per_s)
    assert islands_cost(hidden).utilisation == pytest.approx(1.0)
    assert islands_cost(PAPER).hiding_bytes_per_s == float("inf")


def test_the_table_grows_to_the_right_and_downwards() -> None:
    case = replace(PAPER, fragments=4, overlap_steps=2)
    table = utilisation_table(case, [1e7, 1e8, 1e9], [1, 10, 100, 1000])
    for row in table:
        assert row == sorted(row)
    for column in zip(*table, strict=True):
        assert list(column) == sorted(column)
    assert table[1][2] == islands_cost(replace(case, bytes_per_s=1e8)).utilisation


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"islands": 1}, "islands"),
        ({"parameters": 0.0}, "parameters"),
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"period": 0}, "period"),
        ({"fragments": 200}, "fragments"),
        ({"fragments": 10, "overlap_steps": 11}, "overlap_steps"),
        ({"overlap_steps": -1}, "overlap_steps"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"wire_bits": 0.0}, "bits"),
    ],
)
def test_islands_that_cannot_run_are_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(PlanError, match=f"({named}).*nearest"):
        replace(PAPER, **change)


def test_targets_are_shares() -> None:
    for function in (smallest_period, needed_bytes_per_s):
        with pytest.raises(PlanError, match=r"target.*nearest"):
            function(PAPER, 1.0)
