"""Pipeline schedules against the published formulas, on a thinned grid of ranks and micro-batches."""

from __future__ import annotations

import random

import pytest
from critical_path import critical_path_s

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import SCHEDULES
from shoal.planning.pipeline_bubble import bubble_s
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import check_schedule
from shoal.teach.costs import AnalyticalCosts
from shoal.teach.schedules_simulate import simulate_schedule, timeline_bubble

RANKS = (1, 2, 3, 4, 7, 8, 16)
near = pytest.approx


def batches(p: int) -> list[int]:
    """Below, at and above the borders at which schedules change, and the largest."""
    return sorted({1, 2, max(1, p - 1), p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 64})


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_and_1f1b_match_the_formulas_for_every_m(p: int) -> None:
    for m in batches(p):
        gpipe, one = (
            check_schedule(make_schedule("gpipe", p, m)),
            check_schedule(make_schedule("1f1b", p, m)),
        )
        assert gpipe.bubble_s == one.bubble_s == (p - 1) * 3
        assert gpipe.in_flight == (m,) * p
        assert one.in_flight == tuple(min(m, p - i) for i in range(p))
        assert one.actions == {"F": p * m, "B": p * m}


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_divides_the_bubble_and_keeps_more(p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        count = check_schedule(make_schedule("interleaved", p, m, v))
        assert count.bubble_s == near((p - 1) * 3 / v)
        assert max(count.in_flight) == count.in_flight[0] == near(min(p + (p - 1) / v, m))


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble_keeps_what_1f1b_keeps(p: int) -> None:
    for m in (m for m in batches(p) if m >= p):
        count = check_schedule(make_schedule("zero-bubble", p, m))
        assert count.bubble_s == p - 1  # (p − 1)(F + B − W) at F = B = W = 1
        assert max(count.in_flight) <= min(p, m)


@pytest.mark.parametrize("p", RANKS)
def test_zbv_has_no_bubble_and_even_memory(p: int) -> None:
    for m in (m for m in batches(p) if m >= 2 * p):
        count = check_schedule(make_schedule("zbv", p, m))
        assert count.bubble_s == 0
        assert count.in_flight == (p,) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_dualpipe_matches_its_paper(p: int) -> None:
    """(p/2 − 1)(F&B + (B + W) − 3W) at F = B = W; p + 1 micro-batches kept."""
    for m in (2 * p, 2 * p + 2, 3 * p, 64):
        schedule = make_schedule("dualpipe", p, m)
        count = check_schedule(schedule)
        assert count.bubble_s == near((p / 2 - 1) * (3 + 2 - 3))
        assert count.in_flight == (p + 1,) * p
        assert check_schedule(schedule, blocks=False).bubble_s <= count.bubble_s
        overlapped = check_schedule(schedule, pair_s=2.4).bubble_s
        assert overlapped <= (p / 2 - 1) * (2.4 + 2 - 3) + 1e-9


def legal(name: str, p: int, m: int) -> bool:
    return not (name == "interleaved" and m % p) and not (
        name == "dualpipe" and (p % 2 or m % 2 or m < 2 * p)
    )


def cases(count: int) -> list[tuple[str, int, int, int, tuple[float, float, float]]]:
    draw = random.Random(4)
    found = []
    while len(found) < count:
        name, p, m = SCHEDULES[len(found) % 6], draw.randint(1, 8), draw.randint(1, 24)
        costs = tuple(draw.choice((0.5, 0.8, 1.0, 1.3, 2.0)) for _ in range(3))
        if legal(name, p, m):
            v = draw.randint(2, 3) if name == "interleaved" else 1
            found.append((name, p, m, v, (costs[0], costs[1], costs[2])))
    return found


@pytest.mark.parametrize(("name", "p", "m", "v", "costs"), cases(60))
def test_engine_and_checker_agree_and_nothing_beats_the_critical_path(
    name: str, p: int, m: int, v: int, costs: tuple[float, float, float]
) -> None:
    schedule = make_schedule(name, p, m, v)
    count = check_schedule(schedule, *costs)
    line = simulate_schedule(schedule, AnalyticalCosts.for_pipeline(*costs))
    assert line.end_s == near(count.makespan_s)
    assert timeline_bubble(line) == near(count.bubble_s, abs=1e-9)
    least, least_bubble = critical_path_s(schedule, *costs)
    assert count.makespan_s >= least - 1e-9
    assert count.bubble_s >= least_bubble - 1e-9
    assert bubble_s(name, p, m, *costs, v) == near(count.bubble_s, rel=0.02, abs=1e-9)
    alone = check_schedule(schedule, *costs, blocks=False)
    line = simulate_schedule(schedule, AnalyticalCosts.for_pipeline(*costs), blocks=False)
    assert (line.end_s, timeline_bubble(line)) == near((alone.makespan_s, alone.bubble_s), abs=1e-9)


def test_critical_path_is_reached_where_nothing_can_be_moved() -> None:
    for p, m in ((1, 3), (4, 1), (4, 8), (8, 5)):
        schedule = make_schedule("1f1b", p, m)
        count = check_schedule(schedule, 1, 2, 0.5)
        assert critical_path_s(schedule, 1, 2, 0.5) == near((count.makespan_s, count.bubble_s))


def test_memory_on_the_timeline_is_the_checkers_count() -> None:
    for name in ("1f1b", "zero-bubble", "zbv"):
        schedule = make_schedule(name, 4, 9)
        line = simulate_schedule(
            schedule, AnalyticalCosts.for_pipeline(1, 1, 1), activation_bytes=10
        )
        peaks = tuple(line.peak_bytes(rank) for rank in range(4))
        assert peaks == tuple(10 * kept for kept in check_schedule(schedule).in_flight)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (("1f1bb", 2, 2, 1), "try: 1f1b"),
        (("interleaved", 4, 6, 2), "multiple of layout.pp = 4, got 6; try: 8"),
        (("interleaved", 4, 8, 1), "at least 2 chunks per rank, got 1; try: 2"),
        (("1f1b", 4, 8, 2), "holds 1 stage per rank, got 2 chunks"),
        (("zbv", 4, 8, 3), "holds 2 stages per rank, got 3 chunks"),
        (("dualpipe", 3, 8, 1), "try: layout.pp=4 and 8"),
        (("dualpipe", 4, 6, 1), "try: layout.pp=4 and 8"),
        (("gpipe", 0, 8, 1), "at least 1 rank"),
    ],
)
def test_impossible_schedules_are_one_line_with_the_nearest_legal(
    case: tuple[str, int, int, int], says: str
) -> None:
    with pytest.raises(PlanError) as error:
        make_schedule(*case)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_bubbles_of_long_pipelines_grow_with_their_length() -> None:
    """Counted at 32 ranks and scaled: within 3 % of the list of 40."""
    costs = (0.5, 1.0, 2.0)
    for name in ("zbv", "dualpipe"):
        counted = check_schedule(make_schedule(name, 40, 80), *costs).bubble_s
        assert bubble_s(name, 40, 80, *costs) == near(counted, rel=0.03)
    assert bubble_s("afab", 1, 5, 1, 1, 1) == 0
    assert bubble_s("zbv", 4, 5, 0, 0, 0) == 0
