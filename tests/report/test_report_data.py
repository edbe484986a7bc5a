"""Columns, samples, times by rank and images of a report, compared with plain computations."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement, make_even_cut
from shoal.base.runlog.rank_records import PARTS, RankStep, encode_header
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import check_schedule
from shoal.report import metric_series
from shoal.report.metric_series import read_step_metrics, sample_knots, sample_series
from shoal.report.png_image import encode_png, make_palette
from shoal.report.rank_times import lateness, read_rank_times
from shoal.report.sections.expert_tokens import read_expert_loads
from shoal.report.sections.measured_costs import mean_traffic
from shoal.report.sections.pipeline_timeline import time_schedule
from shoal.report.sections.rank_layout import stored_elements
from shoal.report.sections.recorded_actions import read_recorded_step
from shoal.report.svg_charts import round_ticks


def test_a_spike_of_one_step_stays_exact_wherever_it_is() -> None:
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 20_000, 6):
        values = rng.normal(3, 0.1, 20_000)
        values[place] = 17.123456789
        sampled = sample_series(range(1, 20_001), values)
        assert len(sampled.values) <= 2 * metric_series.BUCKETS
        at = sampled.values.index(max(sampled.values))
        assert (sampled.steps[at], sampled.values[at]) == (place + 1, 17.123456789)
        assert min(sampled.values) == values.min()
        assert sampled.steps == sorted(set(sampled.steps))
        assert np.mean(sampled.means) == pytest.approx(values.mean())


def metrics_file(path: Path, rows: list[dict[str, object]], raw: dict[int, bytes]) -> Path:
    lines = [json.dumps(row).encode() for row in rows]
    for place, line in raw.items():
        lines.insert(place, line)
    path.write_bytes(b"\n".join(lines) + b'\n{"step": 99')
    return path


def test_blocks_read_by_msgspec_have_the_columns_of_lines_read_by_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, object]] = [
        {"step": n, "loss": n / 7, "grad_norm": None if n % 5 == 0 else 0.1 * n, "tokens": 3,
         "step_s": 0.5, **({"metrics": {"kl": n, "text": "x"}} if n > 20 else {})}
        for n in range(1, 60)
    ]  # fmt: skip
    damage = {5: b"{", 17: b'{"step": 700, "loss": "x"}', 30: b"\xff\xfe", 41: b'{"step": -4}'}
    path = metrics_file(tmp_path / "metrics.jsonl", rows, damage)
    plain = read_step_metrics(path, keep=[7])
    monkeypatch.setattr(metric_series, "SMALL_BYTES", 0)
    monkeypatch.setattr(metric_series, "BLOCK_BYTES", 700)
    fast = read_step_metrics(path, keep=[7])
    assert (fast.steps, fast.damaged, fast.marked) == (plain.steps, plain.damaged, plain.marked)
    assert list(plain.steps) == [*range(1, 60), 700]
    assert plain.damaged == 3
    assert plain.marked[7]["loss"] == 1.0
    for name, values in plain.columns.items():
        np.testing.assert_array_equal(fast.columns[name], values)
    assert plain.column("grad_norm")[0][:5].tolist() == [1, 2, 3, 4, 6]
    assert plain.column("metrics.kl") == (plain.steps[20:59], plain.columns["metrics.kl"][20:59])
    assert plain.column("tokens_per_s")[1][0] == 6.0
    assert sample_knots(plain)[-1] == (700, 177.0, 29.5)


def test_a_line_longer_than_any_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_series, "BLOCK_BYTES", 64)
    monkeypatch.setattr(metric_series, "LONGEST_LINE", 500)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"loss":2}\n' + b"[" * 5_000 + b'\n{"step":2,"loss":3}\n')
    assert read_step_metrics(path).steps.tolist() == [1, 2]


def write_ranks(folder: Path, rows: list[RankStep], nodes: int = 1) -> Path:
    (folder / "rank_steps").mkdir(parents=True)
    for node in range(nodes):
        own = [row for row in rows if row.rank % nodes == node]
        content = encode_header(node) + b"".join(row.encode() for row in own) + b"torn"
        (folder / "rank_steps" / f"node-{node}.bin").write_bytes(content)
    return folder


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (3, 2), (4, 1)])
def test_times_by_rank_are_those_of_a_plain_computation(
    ranks: int, nodes: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(ranks)
    seconds = rng.gamma(4, 0.01, (800, ranks, len(PARTS))).astype(np.float32)
    missing = (40, 1) if ranks != 2 else None  # one rank's step was not read
    rows = [
        RankStep(step + 1, rank, 1, 0.0, 0, tuple(map(float, seconds[step, rank])))
        for step in range(800)
        for rank in range(ranks)
        if (step, rank) != missing
    ]
    found = read_rank_times(write_ranks(tmp_path, rows, nodes))
    assert found is not None
    assert (found.steps, found.first_step, found.last_step) == (800 - bool(missing), 1, 800)
    waits = seconds[..., -1]
    waits = np.delete(waits, 40, axis=0) if missing else waits
    late = np.array(
        [
            [max(0.0, median(np.delete(row, rank)) - row[rank]) for rank in range(ranks)]
            for row in waits
        ]
    )
    np.testing.assert_allclose(lateness(waits), late, atol=1e-6)
    np.testing.assert_allclose(found.late_s, late.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.worst_s, late.max(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.late_map.max(axis=1), late.max(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.mean_s[0], seconds[:, 0].mean(axis=0), rtol=1e-4)
    step, rank = divmod(int(late.argmax()), ranks)
    worst = found.moments[0]
    assert (worst.step, worst.rank) == (step + 1 + (step >= 40 and bool(missing)), rank)
    assert worst.late_s == pytest.approx(late.max(), rel=1e-4)
    part = PARTS.index(worst.part)
    others = [seconds[worst.step - 1, other, part] for other in range(ranks) if other != rank]
    assert worst.usual_s == pytest.approx(median(others), rel=1e-4)


def test_rows_that_are_no_times_change_no_mean(tmp_path: Path) -> None:
    good = [RankStep(step, rank, 1, 0.0, 0, (0.25,) * 8) for step in (1, 2) for rank in (0, 1)]
    bad = [RankStep(3, 0, 1, 0.0, 0, (value,) * 8) for value in (math.nan, math.inf, 1e30)]
    found = read_rank_times(write_ranks(tmp_path, good + bad))
    assert found is not None
    assert found.mean_s.tolist() == [[0.25] * 8] * 2
    assert found.last_step == 2


def test_a_png_is_read_back() -> None:
    content = encode_png([bytes([0, 1, 255]), bytes([9, 8, 7])])
    chunks, at = {}, 8
    while at < len(content):
        (size,) = struct.unpack_from(">I", content, at)
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", content, at + 8 + size)[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == bytes([0, 0, 1, 255, 0, 9, 8, 7])
    assert chunks[b"PLTE"] == make_palette()
    palette = np.frombuffer(make_palette(), np.uint8).reshape(-1, 3)
    luminance = (palette @ [0.2126, 0.7152, 0.0722]).tolist()
    assert luminance == sorted(luminance, reverse=True), "readable without colours"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"])
def test_a_drawn_schedule_takes_as_long_as_the_checked_one(name: str) -> None:
    chunks = {"interleaved": 2, "zbv": 2, "dualpipe": 2}.get(name, 1)
    schedule = make_schedule(name, 4, 8, chunks)
    timed = time_schedule(schedule, lambda rank, kind: 2.0 if kind == "B" else 1.0)
    assert len(timed) == sum(map(len, schedule.ranks))
    counts = check_schedule(schedule, 1.0, 1.0, 1.0, blocks=False)
    assert max(one.end_s for one in timed) == pytest.approx(counts.makespan_s)


def recorded(
    step: int, first_s: float = 0.0, second_s: float = 0.0, **more: object
) -> dict[str, object]:
    """Two stages, one micro-batch: forward 1 s, backward 2 s; clocks of two hosts."""
    ranks = [
        {"began_s": first_s, "actions": [["F0@0", 0.0, 0.0, 1.0], ["B0@0", 1.0, 4.1, 6.1]]},
        {"began_s": second_s, "actions": [["F0@1", 0.0, 1.0, 2.0], ["B0@1", 2.0, 2.0, 4.0]]},
    ]
    return {"step": step, "schedule": "1f1b", "timed_by": "device", "ranks": ranks, **more}


def test_actions_of_the_newest_sampled_step_on_one_clock() -> None:
    """A clock half a second off is mended; damaged, foreign and huge records are left out."""
    odd: list[dict[str, object]] = [
        recorded(16, ranks=[]),
        recorded(16, ranks=[{"began_s": 0.0, "actions": [["F0@0", 0.0, 3.0, 1.0]]}] * 2),
        recorded(16, ranks=[{"began_s": -1.0, "actions": [["F0@0", 0.0, 1.0, 1.0]]}] * 2),
        recorded(16, ranks=[{"began_s": 0.0, "actions": [["<b>", 0.0, 1.0, 1.0]]}] * 2),
        recorded(16, ranks=[{"began_s": 0.0, "actions": [["F0@0", 0.0, 1.0, math.inf]]}] * 2),
        {"step": "x", "ranks": recorded(1)["ranks"]},
    ]
    for first_s, second_s, late_s in ((0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.5, 0.1)):
        found = read_recorded_step([recorded(2), recorded(8, first_s, second_s), *odd], 2, 10)
        assert found is not None
        assert (found.step, found.timed_by) == (8, "device")
        assert [o.action.text() for o in found.actions] == ["F0@0", "B0@0", "F0@1", "B0@1"]
        spans = [(o.start_s, o.end_s, o.wait_s) for o in found.actions]
        expected = [(0.0, 1.0, 0.0), (4.1, 6.1, 3.1), (1 + late_s, 2 + late_s, 1.0)]
        np.testing.assert_allclose(spans, [*expected, (2 + late_s, 4 + late_s, 0.0)], atol=1e-9)
    assert read_recorded_step([recorded(8)], 2, 3) is None
    assert read_recorded_step([recorded(8)], 3, 10) is None


def test_ranks_hold_together_what_the_model_has() -> None:
    layout = Layout(dp_shard=3, tp=2, pp=2, zero=3)
    cut = make_even_cut("tp", 0, 20, 2)
    rows = [
        Placement("a", (20, 7), "float32", stages=(0,), cut=cut, data="rows"),
        Placement("b", (11,), "float32", stages=(1,), data="rows"),
    ]
    held = [[stored_elements(row, layout.at(rank), layout) for rank in range(12)] for row in rows]
    assert sum(held[0]) == 140
    assert sum(held[1]) == 11 * layout.tp
    assert [rank for rank in range(12) if held[0][rank]] == [
        r for r in range(12) if layout.at(r)["pp"] == 0
    ]


def test_loads_of_experts_and_bytes_by_axis() -> None:
    records = [{"step": n, "layers": {"a": [1, 3], "b": [0, 5, 5, 0]}} for n in range(2_000)]
    first, second = read_expert_loads(records)
    assert (first.name, first.count, first.idle, second.idle) == ("a", 2_000, 0, 2_000)
    assert len(first.loads) < 640
    assert first.steps[-1] == 1_999
    np.testing.assert_allclose(np.mean(first.loads, axis=0), [0.5, 1.5])
    row = {"comm_bytes_by_axis": {"tp": {"all_reduce": 6}, "pp": {"send": 4, "x": None}}}
    assert mean_traffic([row, row])[0] == {("tp", "all_reduce"): 6.0, ("pp", "send"): 4.0}
    old = mean_traffic([{"comm_bytes_by_kind": {"all_reduce": 8}}])
    assert old == ({("", "all_reduce"): 8.0}, False)


def test_ticks_enclose_any_range() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        low = float(rng.normal() * 10.0 ** rng.integers(-12, 12))
        high = low + abs(float(rng.normal() * 10.0 ** rng.integers(-12, 12)))
        ticks = round_ticks(low, high)
        assert ticks == sorted(ticks)
        assert 2 <= len(ticks) <= 12
        slack = 1e-6 * (ticks[-1] - ticks[0]) + 1e-9 * abs(low)
        assert ticks[0] <= low + slack
        assert ticks[-1] >= high - slack
