"""The reading of a profile names the first cause, on made profiles whose cause is known."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("profile_reading")


def read(module: ModuleType, name: str, **changed: Any) -> Any:
    made = json.loads((HERE / "made_profiles" / f"{name}.json").read_text())
    made |= changed
    return module.read_profile(
        made["traceEvents"],
        step_s=made["step_s"],
        steps=made["steps"],
        block_passes=made["block_passes"],
    )


CAUSES = {
    "launches": "the host launches too slowly: the device idles 70% of a step (0.28 of 0.4 ms); "
    "10 launches a step, one every 40 us under the profiler, 5 kernels a block and pass",
    "waits": "the host waits for the device: the device idles 37% of a step (0.297 of 0.8 ms); "
    "cudaStreamSynchronize 1 times",
    "copies": "copies and casts take 65% of a step (0.2 of 0.31 ms), 5 kernels a block and pass",
    "products": "matrix products and attention take 95% of a step, and no other part 8%",
    "latency": "launched kernels begin late: the device idles 70% of a step (0.35 of 0.5 ms); "
    "dependencies between streams, or kernels shorter than a launch",
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause_of_a_made_profile(reading: ModuleType, name: str) -> None:
    assert reading.first_cause(read(reading, name)) == CAUSES[name]


def test_parts_of_a_step_add_up(reading: ModuleType) -> None:
    for name in CAUSES:
        found = read(reading, name)
        assert found.work_s + sum(found.idle_s.values()) == pytest.approx(found.step_s), name
        assert sum(found.kinds_s.values()) == pytest.approx(found.work_s, rel=0.05), name


def test_idle_time_is_what_the_profiler_did_not_make(reading: ModuleType) -> None:
    """A step that is faster without the profiler idles less; kernels take as long."""
    slow, fast = read(reading, "launches"), read(reading, "launches", step_s=0.0002)
    assert fast.work_s == slow.work_s
    assert fast.idle == pytest.approx(0.5)


def test_a_wait_that_ends_before_the_device_is_done_costs_nothing(reading: ModuleType) -> None:
    made = json.loads((HERE / "made_profiles" / "waits.json").read_text())
    for one in made["traceEvents"]:
        if "Synchronize" in one["name"]:
            one["dur"] = 1
    found = read(reading, "waits", traceEvents=made["traceEvents"])
    assert found.idle_s["waits"] == 0
    assert reading.first_cause(found).startswith("the host launches too slowly")


def test_kernels_of_two_streams_at_once_count_once(reading: ModuleType) -> None:
    made = json.loads((HERE / "made_profiles" / "copies.json").read_text())
    kernels = [one for one in made["traceEvents"] if one["cat"] == "kernel"]
    both = made["traceEvents"] + [{**one, "args": {}} for one in kernels]
    found = read(reading, "copies", traceEvents=both)
    assert found.work_s == pytest.approx(read(reading, "copies").work_s)


def test_a_peer_shows_where_time_is_lost(reading: ModuleType) -> None:
    ours, theirs = read(reading, "copies"), read(reading, "products")
    assert reading.compare(ours, replace(theirs, step_s=ours.step_s / 2), "fsdp2") == (
        "2.00 of fsdp2's step; the most is lost in: copies and casts (5 kernels a block and pass, "
        "0 there), 0.2 ms a step"
    )
    assert reading.compare(ours, ours, "itself") == "1.00 of itself's step; no part takes longer"


def test_a_profile_without_kernels_is_refused(reading: ModuleType) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        read(reading, "launches", traceEvents=[])
