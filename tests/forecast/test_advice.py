"""Uneven clusters: what waits for what, and how often islands may average."""

from __future__ import annotations

from planned_case import run_of

from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.cluster_advice import advise_on_cluster
from shoal.forecast.search.layout_search import least_memory_bytes, search_layouts
from shoal.forecast.search.search_space import SearchSpace

MODEL = transformer_facts(published_shape("gpt-3-1.3b"), 2048, 2)


def test_a_mixed_cluster_waits_for_its_slowest_part() -> None:
    mixed = parse_machines("8xV100-32GB + 8xA100-40GB")
    best = search_layouts(run_of(MODEL, mixed, compute="fp16"), SearchSpace())[0]
    even = search_layouts(
        run_of(MODEL, parse_machines("2x8xA100-40GB"), compute="fp16"), SearchSpace()
    )[0]
    assert best.time.step_s > 1.5 * even.time.step_s
    assert 0 < best.mfu < 1
    assert least_memory_bytes(mixed) == mixed.device.memory_bytes
    ((label, text),) = advise_on_cluster(best)
    assert label == "mixed"
    assert text.startswith("every step waits for V100-32GB")
    assert "A100-40GB 7" in text


def test_islands_are_told_how_often_to_average() -> None:
    slow = parse_machines("4x(8xH100-80GB)@200Mbit")
    ((label, text),) = advise_on_cluster(search_layouts(run_of(MODEL, slow), SearchSpace())[0])
    assert label == "islands"
    assert "averaging weights every" in text
    assert "200 Mbit/s" in text
    fast = parse_machines("4x(8xH100-80GB)@10Gbit")
    ((_, quick),) = advise_on_cluster(search_layouts(run_of(MODEL, fast), SearchSpace())[0])
    slower, faster = (int(t.split("weights every ")[1].split()[0]) for t in (text, quick))
    assert slower > 10 * faster


def test_an_even_cluster_needs_none() -> None:
    assert (
        advise_on_cluster(
            search_layouts(run_of(MODEL, parse_machines("8xH100-80GB")), SearchSpace())[0]
        )
        == []
    )
