"""Bytes on the wire per step: what the kernel counted, against the planner's arithmetic.

The worlds live in a network namespace of their own, so /proc/net/dev of its loopback counts their
traffic and nothing else: payload, TCP/IP headers and acknowledgements. One world per number of
ranks runs all layouts, one after the other.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forks import shared
from netns import FORBIDDEN, skip
from shoal.base.layouts.layout import Layout
from shoal.fabric.collectives.traffic_counts import wire_bytes
from shoal.forecast.time.step_traffic import StepTraffic
from traffic_theory import Payload, step_traffic

PROGRAM = Path(__file__).parents[1] / "in_namespace.py"
DEADLINE_S = 170
LEAST_PAYLOAD_BYTES = 32 * 2**20
TALLY_BYTES = 8 * 1024  # a step's own numbers, which are not gradients, are less than this

Case = tuple[int, str, int, bool]
"""Ranks, layout, micro-batches per rank, whether sums are deferred."""

CASES: list[Case] = [
    (ranks, layout, accumulate, deferred)
    for ranks in (2, 4)
    for layout in ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    for accumulate in (1, 3)
    for deferred in (False, True)
    if not (layout == "hsdp" and ranks == 2)
    if not (ranks == 2 and accumulate == 3 and layout in ("zero2", "fsdp"))
    if not (deferred and (accumulate == 1 or layout not in ("zero2", "fsdp")))
]


SHORT: list[Case] = [(4, "zero2", 3, True), (4, "hsdp", 3, False)]
"""`make test` measures 4 ranks, where a wrong factor of 2 shows as well: sums that wait for the last
micro-batch, and hsdp, which sends what fsdp sends and what ddp sends."""
SHOWN = [case if case in SHORT else pytest.param(case, marks=pytest.mark.proof) for case in CASES]


def names(case: Case) -> str:
    ranks, layout, accumulate, deferred = case
    return f"{layout}-{ranks}-{accumulate}" + ("-deferred" if deferred else "")


@pytest.fixture(scope="module")
def counted(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Case, dict[str, Any]]:
    """What rank 0 measured in every case that is asked for."""
    folder = tmp_path_factory.mktemp("bytes")
    short = request.config.option.markexpr == "not proof"
    cases = [case for case in CASES if case in SHORT or not short]
    requests = []
    for case in cases:
        ranks, layout, accumulate, deferred = case
        arguments = {"layout": layout, "accumulate": accumulate, "defer_sync": deferred}
        requests.append([ranks, {**arguments, "folder": str(folder / names(case))}])
    words = (str(PROGRAM), "bytes_case:measure", json.dumps(requests))
    done = shared().run(*words, timeout=DEADLINE_S)
    if done.returncode == FORBIDDEN:
        skip("bytes on the wire NOT MEASURED", done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def theory(case: Case, measured: dict[str, Any]) -> StepTraffic:
    """What the planner says of a case."""
    _, _, accumulate, deferred = case
    whole, root = measured["gradient_bytes"], measured["root_bytes"]
    payload = Payload(
        gradient_bytes=whole, weight_bytes=whole, unit_bytes=whole - root, root_bytes=root
    )
    layout = Layout(**measured["degrees"], zero=measured["zero"])
    return step_traffic(layout, payload, accumulate=accumulate, defer_sync=deferred)


def told(measured: dict[str, Any]) -> Counter[str]:
    """What rank 0's counters added up in one step, without the step's own numbers."""
    sent: Counter[str] = Counter()
    for kind, payload_bytes, degree in measured["calls"]:
        if payload_bytes > TALLY_BYTES and degree > 1:
            sent[f"{kind}_bytes"] += wire_bytes(kind, payload_bytes, degree)
    return sent


@pytest.mark.parametrize("case", SHOWN, ids=names)
def test_kernel_counts_what_theory_says(counted: dict[Case, Any], case: Case) -> None:
    measured, ranks = counted[case], case[0]
    assert measured["gradient_bytes"] >= LEAST_PAYLOAD_BYTES
    assert measured["buckets"] > 1
    expected = ranks * theory(case, measured).total_bytes
    assert measured["kernel_bytes"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("case", SHOWN, ids=names)
def test_counters_say_what_theory_says(counted: dict[Case, Any], case: Case) -> None:
    """To the byte, and kind by kind."""
    expected = {k: v for k, v in vars(theory(case, counted[case])).items() if v}
    assert dict(told(counted[case])) == expected


@pytest.mark.parametrize("case", SHOWN, ids=names)
def test_axes_say_what_theory_says(counted: dict[Case, Any], case: Case) -> None:
    """Parts are summed over replicas, all else over shards; the step's numbers over all ranks."""
    measured, expected = counted[case], theory(case, counted[case])
    by_axis = {axis: dict(kinds) for axis, kinds in measured["by_axis"].items()}
    summed: Counter[str] = Counter()
    for kinds in by_axis.values():
        summed.update(kinds)
    assert summed == {kind: n for kind, n in measured["by_kind"].items() if n}
    inside = {
        "all_gather": expected.all_gather_bytes,
        "reduce_scatter": expected.reduce_scatter_bytes,
    }
    across = expected.all_reduce_bytes
    if len(measured["degrees"]) > 1:
        assert by_axis.keys() == {"dp_replicate", "dp_shard", "world"}
        assert by_axis["dp_replicate"] == {"all_reduce": across}
        assert by_axis["dp_shard"] == inside
        assert sum(by_axis["world"].values()) < TALLY_BYTES
        return
    (axis,) = measured["degrees"]
    assert by_axis.keys() == {axis}
    for kind, size_bytes in {**inside, "all_reduce": across}.items():
        assert 0 <= by_axis[axis].get(kind, 0) - size_bytes < TALLY_BYTES, kind


@pytest.mark.parametrize("case", SHOWN, ids=names)
def test_metrics_say_what_the_kernel_counted(counted: dict[Case, Any], case: Case) -> None:
    measured = counted[case]
    told_bytes = case[0] * measured["metrics_bytes"]
    assert told_bytes == pytest.approx(measured["kernel_bytes"], rel=0.02)


@pytest.mark.proof  # what is sent with accumulation is what the planner says without: above
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_accumulation_sends_no_more(counted: dict[Case, Any], ranks: int, layout: str) -> None:
    once, thrice = (counted[ranks, layout, n, False]["kernel_bytes"] for n in (1, 3))
    assert thrice == pytest.approx(once, rel=0.02)
