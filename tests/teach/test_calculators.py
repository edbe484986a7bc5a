"""Textbook formulas against a second way to get the same number: a count, a search, a simulation."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from shoal.base.errors import PlanError
from shoal.teach.calculators import (
    collectives_costs,
    diloco,
    goodput,
    pipeline,
    scaling,
    stragglers,
)
from shoal.teach.calculators import utilisation as used

ALPHA, BETA = 1e-5, 1e-9


def ring_by_rounds(ranks: int, size: float) -> float:
    """2(n−1) rounds in each of which every rank passes one chunk on."""
    return sum(ALPHA + size / ranks * BETA for _ in range(2 * (ranks - 1)))


def halving_by_rounds(ranks: int, size: float) -> float:
    """Half of what is left per round, and back, for a power of two."""
    seconds, part = 0.0, size
    while ranks > 1:
        part, ranks = part / 2, ranks // 2
        seconds += 2 * (ALPHA + part * BETA)
    return seconds


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_all_reduces_are_the_sum_of_their_rounds(ranks: int) -> None:
    size = 3e7
    assert collectives_costs.ring_all_reduce_s(ranks, size, ALPHA, BETA) == pytest.approx(
        ring_by_rounds(ranks, size)
    )
    assert collectives_costs.halving_doubling_s(ranks, size, ALPHA, BETA) == pytest.approx(
        halving_by_rounds(ranks, size)
    )


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    for ranks in (1, 2, 7, 48):
        both = 2 * collectives_costs.ring_all_gather_s(ranks, 5e6, ALPHA, BETA)
        assert collectives_costs.ring_all_reduce_s(ranks, 5e6, ALPHA, BETA) == pytest.approx(both)


def test_no_algorithm_beats_the_lower_bounds() -> None:
    """Every rank must send 2(n−1)/n of the bytes, and news reaches n ranks in log2(n) rounds."""
    for ranks in range(2, 40):
        for size in (8.0, 1e5, 1e9):
            least_bytes_s = 2 * (ranks - 1) / ranks * size * BETA
            least_rounds_s = math.ceil(math.log2(ranks)) * ALPHA
            for algorithm in collectives_costs.ALL_REDUCES.values():
                seconds = algorithm(ranks, size, ALPHA, BETA)
                assert seconds >= max(least_bytes_s, least_rounds_s) * (1 - 1e-12)


def test_two_levels_of_equal_links_cost_a_ring_s_bytes() -> None:
    """With the same β everywhere, two levels move as many bytes per rank as one ring."""
    flat = collectives_costs.ring_all_reduce_s(64, 1e8, 0.0, BETA)
    assert collectives_costs.hierarchical_all_reduce_s(
        8, 8, 1e8, 0.0, BETA, 0.0, BETA
    ) == pytest.approx(flat)


def test_amdahl_and_the_serial_share_undo_each_other() -> None:
    for serial in (0.0, 0.013, 0.4, 1.0):
        for devices in (2, 16, 4096):
            speedup = scaling.amdahl_speedup(serial, devices)
            assert scaling.serial_share(speedup, devices) == pytest.approx(serial, abs=1e-12)
    assert scaling.amdahl_speedup(0.05, 10**9) == pytest.approx(
        scaling.amdahl_limit(0.05), rel=1e-6
    )


def test_no_row_of_the_known_table_has_one_serial_share() -> None:
    for shares in scaling.copied_serial_shares().values():
        assert max(shares) / min(shares) > 1.5


def test_the_known_rows_implied_shares() -> None:
    shares = {k: [round(100 * q, 1) for q in v] for k, v in scaling.copied_serial_shares().items()}
    assert (shares["DP"][0], shares["DP"][-1]) == (11.1, 6.7)
    assert (shares["DDP"][0], shares["DDP"][-1]) == (5.3, 1.5)
    assert (shares["FSDP"][0], shares["FSDP"][-1]) == (5.3, 1.0)


def test_the_ring_factor_is_the_difference_to_the_common_form() -> None:
    devices, size, single = 16, 1e9, 2.0
    common = scaling.common_step_s(single, devices, size, 0.0, BETA)
    ring = scaling.ring_step_s(single, devices, size, 0.0, BETA)
    assert (ring - single / devices) / (common - single / devices) == pytest.approx(2 * 15 / 16)


def test_overlap_never_hides_more_than_there_is() -> None:
    alone = scaling.ring_step_s(1.0, 8, 1e6, ALPHA, BETA, overlap=1.0)
    assert alone == pytest.approx(1 / 8)
    assert (
        scaling.speedup_table([4], 1.0, 1e9, ALPHA, BETA)[0].ring
        > scaling.speedup_table([4], 1.0, 1.5e9, ALPHA, BETA)[0].ring
    )


@pytest.mark.parametrize(
    ("mean_h", "stall_s", "minutes", "share"), [(3.1, 60, 19, 0.84), (3.1, 5, 5.6, 0.92)]
)
def test_worked_goodput(mean_h: float, stall_s: float, minutes: float, share: float) -> None:
    tau = goodput.young_interval_s(stall_s, mean_h * 3600)
    assert tau / 60 == pytest.approx(minutes, rel=0.02)
    assert goodput.first_order_goodput(tau, stall_s, 600, mean_h * 3600) == pytest.approx(
        share, abs=0.005
    )


def test_first_order_is_the_limit_of_the_exact_goodput() -> None:
    """Where losses are small the two forms differ by their squares only."""
    for scale in (1.0, 0.1, 0.01):
        stall, restart, mean = 60 * scale, 600 * scale, 1e6
        tau = goodput.young_interval_s(stall, mean)
        first = goodput.first_order_goodput(tau, stall, restart, mean)
        exact = goodput.goodput(tau, stall, restart, mean)
        assert abs(first - exact) < 2 * (1 - exact) ** 2


def test_the_best_interval_is_best_and_daly_is_near_it() -> None:
    for stall, mean in ((60.0, 11160.0), (5.0, 840.0), (300.0, 3600.0)):
        best = goodput.best_interval_s(stall, 600, mean)
        top = goodput.goodput(best, stall, 600, mean)
        for factor in (0.9, 0.99, 1.01, 1.1):
            assert goodput.goodput(best * factor, stall, 600, mean) < top
        assert goodput.daly_interval_s(stall, mean) == pytest.approx(best, rel=0.02)
        assert goodput.goodput(goodput.young_interval_s(stall, mean), stall, 600, mean) > top - 0.01


def test_lost_time_adds_up() -> None:
    parts = goodput.time_shares(1157, 60, 600, 11160, 120)
    assert sum(parts.values()) == pytest.approx(1)
    assert all(part > 0 for part in parts.values())


def test_a_run_that_never_gets_through_has_no_goodput() -> None:
    assert goodput.goodput(1e6, 60, 600, 10) == 0.0


def test_pipelines_reach_the_share_and_one_fewer_does_not() -> None:
    for name in ("1f1b", "zero-bubble", "interleaved"):
        count = pipeline.micro_batches_for(name, 8, 0.05, chunks=2)
        unit = 8 if name == "interleaved" else 1
        assert pipeline.bubble_of_step(name, 8, count, chunks=2) <= 0.05
        assert pipeline.bubble_of_step(name, 8, count - unit, chunks=2) > 0.05


def test_diloco_published_factors() -> None:
    assert diloco.traffic_reduction(100, 8, 32) == diloco.traffic_reduction(100, 4, 16) == 400
    for seconds, share in ((103, 95.7), (382, 85.6), (469, 83.0)):
        assert 100 * diloco.utilisation(2280, seconds) == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("name", stragglers.DISTRIBUTIONS)
def test_the_largest_of_64_as_64_draws_have_it(name: str) -> None:
    """Draws per device here, one draw per step there, and the integral: three ways, one mean."""
    one = stragglers.StepTimes(2.0, 0.2, name)
    draw = random.Random(5)
    largest = [max(one.upper_quantile_s(1 - draw.random()) for _ in range(64)) for _ in range(3000)]
    error = statistics.stdev(largest) / math.sqrt(len(largest))
    mean = stragglers.largest_mean_s(one, 64)
    assert abs(statistics.mean(largest) - mean) < 4 * error
    assert abs(stragglers.simulate_steps(one, 64, 3000)[0] - mean) < 4 * error


@pytest.mark.parametrize("name", stragglers.DISTRIBUTIONS)
def test_every_distribution_has_the_mean_and_spread_it_was_given(name: str) -> None:
    one, count = stragglers.StepTimes(3.0, 0.2, name), 200_000
    values = [one.upper_quantile_s((i + 0.5) / count) for i in range(count)]
    assert statistics.fmean(values) == pytest.approx(3.0, rel=1e-3)
    assert statistics.pstdev(values) == pytest.approx(0.6, rel=0.01)
    assert stragglers.largest_mean_s(one, 1) == pytest.approx(3.0, rel=1e-6)


def test_exponential_tails_meet_the_harmonic_numbers() -> None:
    for devices in (1, 3, 100, 100_000):
        harmonic = sum(1 / k for k in range(1, devices + 1))
        one = stragglers.StepTimes(1.0, 0.25, "exponential")
        expected = 1 + 0.25 * (harmonic - 1)
        assert stragglers.largest_mean_s(one, devices) == pytest.approx(expected, rel=1e-9)


def test_the_largest_of_100_000_normals() -> None:
    """E max of n standard normals, as printed in tables: 3.2414 for 1000, 4.3844 for 100 000."""
    for devices, table in ((1000, 3.2414), (100_000, 4.3844)):
        mean = stragglers.largest_mean_s(stragglers.StepTimes(1.0, 0.1), devices)
        assert (mean - 1) / 0.1 == pytest.approx(table, abs=2e-4)


WRONG = {
    "ranks": lambda: collectives_costs.ring_all_reduce_s(0, 1.0, 0.0, 0.0),
    "alpha_s": lambda: collectives_costs.tree_all_reduce_s(2, 1.0, -1.0, 0.0),
    "seconds": lambda: collectives_costs.bus_bytes_per_s(2, 1.0, 0.0),
    "serial": lambda: scaling.amdahl_speedup(1.5, 4),
    "speedup": lambda: scaling.serial_share(0.0, 4),
    "overlap": lambda: scaling.ring_step_s(1.0, 4, 1.0, 0.0, 0.0, overlap=2.0),
    "gpus": lambda: scaling.serial_share(1.0, 1),
    "write_s": lambda: goodput.goodput(10, 1, 1, 100, 11),
    "mtbf": lambda: goodput.young_interval_s(1, 0),
    "stall_s": lambda: goodput.young_interval_s(-1, 10),
    "share": lambda: pipeline.micro_batches_for("1f1b", 4, 1.0),
    "chunks": lambda: pipeline.bubble_of_step("1f1b", 4, 4, chunks=0),
    "recompute": lambda: used.recompute_factor("some", 1.0, 1.0),
    "peak": lambda: used.mfu(1.0, 1.0, 1, 0.0),
    "period": lambda: diloco.traffic_reduction(0, 4, 16),
    "bits": lambda: diloco.bytes_per_outer_step(1e9, 2, 0),
    "bytes_per_s": lambda: diloco.outer_step_s(1e9, 2, 4, 0),
    "distribution": lambda: stragglers.StepTimes(1.0, 0.1, "gaussian"),
    "spread": lambda: stragglers.StepTimes(1.0, 3.0),
    "every": lambda: stragglers.waiting_share(stragglers.StepTimes(1.0, 0.1), 2, 0),
    "slow_share": lambda: stragglers.chance_of_slow(4, 2.0),
    "steps": lambda: stragglers.simulate_steps(stragglers.StepTimes(1.0, 0.1), 2, 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_meaning_is_one_line_that_says_where(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}.*try: |{name}.*not one of") as told:
        WRONG[name]()
    assert "\n" not in str(told.value)
