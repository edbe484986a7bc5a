"""The smallest period and link are enough, less is not; what another setting would give is true."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.base.errors import PlanError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.forecast.search.island_choice import (
    RATES_BYTES_PER_S,
    costs_by_link,
    needed_bytes_per_s,
    propose_settings,
    smallest_period,
)
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost

DILOCO = IslandsPolicy("diloco", count=3)
STREAMING = IslandsPolicy("streaming-diloco", count=3)
FACTS = IslandsFacts(20e6, 0.5, 50e6 / 8, latency_s=0.02)


@pytest.mark.parametrize("target", [0.5, 0.95, 0.99])
@pytest.mark.parametrize(
    "policy", [DILOCO, replace(DILOCO, codec="int8"), replace(STREAMING, codec="none", overlap=4)]
)
def test_the_smallest_period_is_enough_and_one_less_is_not(
    policy: IslandsPolicy, target: float
) -> None:
    period = smallest_period(policy, FACTS, target)
    assert period is not None
    assert islands_cost(replace(policy, period=period), FACTS).utilisation >= target
    settled = policy.resolved()
    if period > settled.fragments * (settled.overlap + 1):
        assert islands_cost(replace(policy, period=period - 1), FACTS).utilisation < target


def test_a_period_holds_at_least_its_fragments_and_may_not_exist() -> None:
    quick = replace(FACTS, bytes_per_s=1e15, ranks=10**9, latency_s=0.0)
    assert smallest_period(replace(STREAMING, fragments=10, overlap=4), quick) == 50
    assert smallest_period(DILOCO, replace(FACTS, bytes_per_s=1e-3)) is None


def test_the_needed_link_is_enough_and_slower_is_not() -> None:
    for policy in (DILOCO, STREAMING):
        link = needed_bytes_per_s(policy, FACTS, 0.9)
        assert islands_cost(policy, replace(FACTS, bytes_per_s=link)).utilisation >= 0.9 - 1e-9
        slower = replace(FACTS, bytes_per_s=0.9 * link)
        assert islands_cost(policy, slower).utilisation < 0.9
    assert needed_bytes_per_s(DILOCO, replace(FACTS, latency_s=100.0), 0.99) == math.inf


def test_the_table_grows_with_the_link() -> None:
    costs = costs_by_link(DILOCO, FACTS)
    used = [cost.utilisation for cost in costs]
    assert [rate * 8 / 1e6 for rate in RATES_BYTES_PER_S] == [10, 50, 200, 1000]
    assert used == sorted(used)
    assert costs[1] == islands_cost(DILOCO, FACTS)


def test_ways_end_with_one_that_is_enough() -> None:
    for policy in (DILOCO, STREAMING, IslandsPolicy("fedopt", count=5, codec="int8")):
        for mbit in (0.5, 5, 50):
            facts = replace(FACTS, bytes_per_s=mbit * 1e6 / 8)
            found = propose_settings(policy, facts, 0.99)
            used = [way.utilisation for way in found]
            assert used == sorted(used)
            assert used[-1] >= 0.99
            assert used[0] > 0
            for way in found:
                assert way.command_text.startswith("islands.")
    assert propose_settings(STREAMING, replace(FACTS, bytes_per_s=1e9), 0.95) == []


def test_no_way_is_worse_than_what_is_there() -> None:
    """On a fast link coding costs more than it saves: int8 was proposed for less."""
    fast = IslandsFacts(20e6, 0.5, 1e12)
    now = islands_cost(DILOCO.resolved(), fast).utilisation
    assert all(way.utilisation > now for way in propose_settings(DILOCO, fast, 0.99999))


def test_islands_that_come_and_go_are_not_sent_to_a_fixed_list() -> None:
    """streaming-diloco refuses `islands.least`."""
    changing = IslandsPolicy("diloco", count=2, least=1, period=100)
    ways = propose_settings(changing, FACTS)
    assert ways
    assert not any("streaming" in way.command_text for way in ways)


def test_ways_say_what_typing_them_gives() -> None:
    for way in propose_settings(DILOCO, FACTS):
        typed = {key: int(value) if value.isdigit() else value for key, value in way.keys}
        assert islands_cost(replace(DILOCO, **typed), FACTS).utilisation == way.utilisation


def test_targets_are_shares() -> None:
    for function in (smallest_period, needed_bytes_per_s, propose_settings):
        with pytest.raises(PlanError, match=r"target = 1: .*try: target=0.95"):
            function(DILOCO, FACTS, 1.0)
