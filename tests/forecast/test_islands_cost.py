"""Islands on slow links against a program of steps, against bytes counted, and published figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError, PlanError
from shoal.base.layouts.island_options import METHODS, IslandsPolicy
from shoal.fabric.compressed.codecs import CODECS, find_codec
from shoal.forecast.search.island_choice import needed_bytes_per_s
from shoal.forecast.time.codec_costs import CODINGS, coded_bytes
from shoal.forecast.time.island_costs import (
    OWN_PASSES,
    IslandsFacts,
    island_paces,
    islands_cost,
    predict_exchange,
)

DILOCO = IslandsPolicy("diloco", count=3)
STREAMING = IslandsPolicy("streaming-diloco", count=3)
FACTS = IslandsFacts(20e6, 0.5, 50e6 / 8, latency_s=0.02, tokens=1024)
MANY = 10**9
"""Processes of an island that leave nothing to wait for but the link."""


def rounds_step_by_step(policy: IslandsPolicy, facts: IslandsFacts) -> float:
    """Seconds per round of islands that step, send, go on, wait and take over, one event each."""
    policy = policy.resolved()
    exchange_s = predict_exchange(policy, facts, policy.count, facts.bytes_per_s).seconds
    own_s = OWN_PASSES * facts.element_bytes * facts.parameters / policy.fragments / facts.ranks
    own_s /= 2 * 5e9
    steps, times = island_paces(policy, facts)
    clock = [0.0] * policy.count
    ends = []
    for _ in range(4):
        sent = [[math.inf] * policy.count for _ in range(policy.fragments)]
        logs: list[list[tuple[str, int]]] = []
        for count in steps:  # what each island does in this round, in order
            log, at = [], 0
            for p in range(policy.fragments):
                apply = max(1, (p + 1) * count // policy.fragments)
                send = max(1, at, apply - policy.overlap)
                log += [("step", -1)] * (send - at) + [("send", p)]
                log += [("step", -1)] * (apply - send) + [("apply", p)]
                at = apply
            logs.append(log)
        while any(logs):
            moved = False
            for island, log in enumerate(logs):
                if not log:
                    continue
                kind, p = log[0]
                if kind == "apply" and math.inf in sent[p]:
                    continue  # somebody has not sent yet
                log.pop(0)
                moved = True
                if kind == "step":
                    clock[island] += times[island]
                elif kind == "send":
                    clock[island] += own_s
                    sent[p][island] = clock[island]
                else:
                    clock[island] = max(clock[island], max(sent[p]) + exchange_s) + own_s
            assert moved, "everybody waits"
        ends.append(max(clock))
    return (ends[-1] - ends[0]) / 3


@pytest.mark.parametrize(
    ("policy", "facts"),
    [
        ({}, {}),
        ({"codec": "int8"}, {"latency_s": 0.2}),
        ({"codec": "top2bit"}, {}),
        ({"overlap": 49}, {}),
        ({"overlap": 7, "codec": "e3m0"}, {"ranks": 4}),
        ({"method": "streaming-diloco"}, {}),
        ({"method": "streaming-diloco", "fragments": 7, "overlap": 6, "codec": "none"}, {}),
        ({"method": "streaming-diloco", "period": 53}, {"bytes_per_s": 1e6}),
        ({}, {"speeds": (1.0, 0.25, 0.5)}),
        ({"method": "streaming-diloco", "overlap": 3}, {"speeds": (1.0, 0.9, 0.33)}),
        ({"method": "streaming-diloco", "overlap": 11}, {"speeds": (0.8, 0.05, 1.0)}),
        ({"method": "streaming-diloco", "overlap": 2}, {"speeds": (1.0, 0.04, 1.0)}),
    ],
)
def test_a_program_that_sends_and_waits_takes_as_long(
    policy: dict[str, Any], facts: dict[str, Any]
) -> None:
    asked, given = replace(DILOCO, **policy), replace(FACTS, **facts)
    found = islands_cost(asked, given)
    assert rounds_step_by_step(asked, given) == pytest.approx(found.round_s, rel=1e-9)
    assert found.compute_s + found.waited_s == pytest.approx(found.round_s)
    assert found.compute_s == pytest.approx(
        sum(h * t for h, t in zip(*island_paces(asked.resolved(), given), strict=True)) / 3
    )


def test_the_formula_of_the_page() -> None:
    """H·t + P·(own + max(0, x − τ·t)), for islands of one speed."""
    for policy in (DILOCO, STREAMING, replace(STREAMING, overlap=11), replace(DILOCO, overlap=3)):
        found, settled = islands_cost(policy, FACTS), policy.resolved()
        own_s = OWN_PASSES * 4 * FACTS.parameters / settled.fragments / 5e9
        one_s = found.exchange_s / settled.fragments
        waits_s = own_s + max(0.0, one_s - settled.overlap * FACTS.step_s)
        expected_s = settled.period * FACTS.step_s + settled.fragments * waits_s
        assert found.round_s == pytest.approx(expected_s, rel=1e-12)
        exposed_s = expected_s - settled.period * FACTS.step_s - settled.fragments * own_s
        assert found.exposed_s == pytest.approx(exposed_s, abs=1e-9)


def test_bytes_are_those_of_what_is_sent() -> None:
    """Two halves of 1/R parts to R − 1 others; coded whole where sums do not stay small."""
    n = 3 * 64 * 65536  # parts of whole blocks
    facts = replace(FACTS, parameters=n)
    for codec, own in (("none", 4 * n), ("bf16", 2 * n), ("int8", n + 4 * n // 65536),
                       ("e3m0", n // 2 + 4 * n // 65536), ("sign", n // 8 + 4 * n // 65536)):  # fmt: skip
        found = islands_cost(replace(DILOCO, codec=codec), facts)
        assert found.sent_bytes == pytest.approx(2 * (own / 3) * 2)
        assert found.bytes_per_token == pytest.approx(found.sent_bytes / (50 * 1024))
    whole = islands_cost(replace(DILOCO, codec="top2bit"), facts)
    assert whole.sent_bytes == pytest.approx(2 * (n // 4096 * 64 * 14 / 8 + n // 65536 * 8))
    assert coded_bytes("none", n, 8) == 8 * n
    double = islands_cost(DILOCO, replace(facts, element_bytes=8))
    assert double.sent_bytes == 2 * islands_cost(DILOCO, facts).sent_bytes


def test_coded_sizes_are_those_of_the_codecs() -> None:
    assert set(CODINGS) == set(CODECS)
    for name in CODECS:
        for dtype in (torch.float32, torch.float64):
            codec = find_codec(name, dtype)
            n = 48 * 65536
            scales = 1.0 if dtype == torch.float32 else 1 + 1e-2  # theirs are twice as wide
            foreseen = coded_bytes(name, n, dtype.itemsize)
            assert foreseen <= codec.size_bytes(n) <= foreseen * scales, name
            assert codec.gathers == CODINGS[name].gathers


def test_fragments_smooth_the_rate_and_send_as_much() -> None:
    facts = replace(FACTS, ranks=MANY, latency_s=0.0)
    whole = islands_cost(replace(STREAMING, fragments=1, overlap=5), facts)
    cut = islands_cost(replace(STREAMING, fragments=10, overlap=4), facts)
    assert cut.sent_bytes == pytest.approx(whole.sent_bytes)
    assert cut.hiding_bytes_per_s == pytest.approx(whole.hiding_bytes_per_s / 10 * 5 / 4, rel=1e-6)
    hidden = replace(facts, bytes_per_s=cut.hiding_bytes_per_s)
    assert islands_cost(replace(STREAMING, fragments=10, overlap=4), hidden).utilisation == (
        pytest.approx(1.0)
    )
    assert islands_cost(DILOCO, facts).hiding_bytes_per_s == math.inf
    assert whole.mean_bytes_per_s < whole.peak_bytes_per_s <= facts.bytes_per_s


def test_a_slow_island_takes_fewer_steps_and_holds_nobody_up() -> None:
    facts = replace(FACTS, speeds=(1.0, 1.0, 0.25))
    found = islands_cost(DILOCO, facts)
    assert found.steps == (50, 50, 12)
    even = islands_cost(DILOCO, FACTS)
    assert found.round_s == pytest.approx(even.round_s)
    assert found.sent_bytes == even.sent_bytes
    assert found.bytes_per_token == pytest.approx(even.bytes_per_token * 150 / 112)
    assert islands_cost(DILOCO, replace(FACTS, speeds=(1.0, 1.0, 0.001))).steps == (50, 50, 1)


def test_regions_meet_far_away_only_now_and_then() -> None:
    two = replace(DILOCO, count=4, regions=2, far_period=5)
    facts = replace(FACTS, near_bytes_per_s=1e9 / 8)
    found, flat = islands_cost(two, facts), islands_cost(replace(DILOCO, count=4), facts)
    near = islands_cost(replace(DILOCO, count=2), replace(facts, bytes_per_s=1e9 / 8))
    assert found.round_s == pytest.approx((flat.round_s + 4 * near.round_s) / 5)
    assert found.sent_bytes == pytest.approx((flat.sent_bytes + 4 * near.sent_bytes) / 5)
    assert found.exchange_s == flat.exchange_s
    assert islands_cost(replace(two, far_period=1), facts).round_s == flat.round_s


def test_one_island_sends_nothing_and_pays_for_its_outer_step() -> None:
    found = islands_cost(IslandsPolicy("diloco"), FACTS)
    assert found.sent_bytes == found.peak_bytes_per_s == found.hiding_bytes_per_s == 0
    assert 0.95 < found.utilisation < 1


def test_a_record_is_plain_json() -> None:
    record = islands_cost(DILOCO, FACTS).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["hiding_bytes_per_s"] is None
    assert record["steps"] == [50, 50, 50]
    assert 0 < record["utilisation"] < 1


def test_memory_is_weights_and_outer_state_of_a_share() -> None:
    def kept(policy: IslandsPolicy) -> float:
        found = islands_cost(replace(policy, count=3), replace(FACTS, ranks=2))
        return found.memory_bytes / (4 * FACTS.parameters / 2)

    assert kept(IslandsPolicy("local-sgd")) == 1
    assert kept(IslandsPolicy("diloco")) == 2
    assert kept(IslandsPolicy("diloco", outer="adamw")) == 3
    assert kept(IslandsPolicy("diloco", outer="adagrad")) == 2
    assert kept(IslandsPolicy("fedopt")) == 3
    assert kept(replace(DILOCO, regions=3)) == 4, "two tiers"
    assert kept(IslandsPolicy("diloco", codec="sign")) == 4, "weights, momentum, two of feedback"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_cost(method: str) -> None:
    data = "own" if method == "scaffold" else "shared"
    found = islands_cost(IslandsPolicy(method, count=4, data=data), FACTS)
    assert 0 < found.utilisation <= 1
    assert found.sent_bytes > 0
    assert set(CODINGS) >= {IslandsPolicy(method, data=data).resolved().codec}


def test_owners_cost_their_messages_states_and_controls() -> None:
    """100 owners in 2 groups, 20 of them in a round; Adam keeps two numbers per parameter."""
    own = IslandsPolicy("fedavg", count=100, data="own", concurrent=2, sample=0.2)
    alone = islands_cost(IslandsPolicy("fedavg", count=2), FACTS)
    found = islands_cost(own, replace(FACTS, inner_numbers=2))
    assert found.sent_bytes == pytest.approx(alone.sent_bytes * 11 / 2)
    assert found.memory_bytes == pytest.approx(alone.memory_bytes * (1 + 10 + 2 * 50))
    assert found.compute_s == pytest.approx(10 * alone.compute_s)
    controlled = islands_cost(replace(own, method="scaffold"), FACTS)
    assert controlled.sent_bytes == pytest.approx(2 * found.sent_bytes)
    assert controlled.memory_bytes == pytest.approx(alone.memory_bytes * (1 + 20 + 51))


PAPER = IslandsPolicy("diloco", count=2, period=100, codec="bf16")
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
    facts = IslandsFacts(*model, 1.0, ranks=MANY)
    for target, gbit in zip((0.5, 0.8, 0.9, 0.95), published, strict=True):
        assert 1.0 <= needed_bytes_per_s(PAPER, facts, target) * 8e-9 / gbit <= 1.3


def test_four_bits_beside_one_step_as_published() -> None:
    policy = IslandsPolicy("streaming-diloco", count=2, period=100, fragments=24)
    facts = IslandsFacts(10e9, 0.8, 1.0, ranks=MANY)
    for target, gbit in zip((0.5, 0.8, 0.9, 0.95), (0.4, 0.9, 1.4, 1.4), strict=True):
        assert 0.9 <= needed_bytes_per_s(policy, facts, target) * 8e-9 / gbit <= 1.25


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parameters": 0.0}, "parameters = 0"),
        ({"bytes_per_s": 0.0}, "bytes_per_s = 0"),
        ({"step_s": -1.0}, "step_s = -1"),
        ({"ranks": 0}, "ranks = 0"),
        ({"latency_s": -1.0}, "latency_s = -1"),
        ({"near_bytes_per_s": -1.0}, "near_bytes_per_s = -1"),
        ({"tokens": -1.0}, "tokens = -1"),
        ({"speeds": (1.0, 0.0)}, "speeds: 0 is no share"),
        ({"speeds": (1.0, 2.0)}, "speeds: 2 is no share"),
    ],
)
def test_facts_that_cannot_be_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"^{named}.*try: "):
        replace(FACTS, **change)


def test_policies_that_cannot_be_foreseen_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^islands.method = none: .*try: islands.method=diloco"):
        islands_cost(IslandsPolicy(), FACTS)
    with pytest.raises(PlanError, match=r"^speeds: 2 for islands.count = 3"):
        islands_cost(DILOCO, replace(FACTS, speeds=(1.0, 0.5)))
    with pytest.raises(ConfigError, match=r"^islands.overlap = 50: .*try: islands.overlap=49"):
        islands_cost(replace(DILOCO, overlap=50), FACTS)
