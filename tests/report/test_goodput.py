"""Goodput: the parts of a run's wall time add up, whatever the folder has."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.rank_records import RankStep, encode_header
from shoal.report.goodput import compute_goodput


def event(time_s: float, name: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "event": name, "step": step, **fields}


KILLED = [
    event(100.0, "run_started", processes=4),
    event(110.0, "compute_started", 0),
    event(130.0, "checkpoint_saved", 10, seconds=0.1),
    event(141.0, "worker_died", rank=1),
    event(142.0, "restarting", saved=10),
    event(147.0, "resumed", 10),
    event(150.0, "compute_started", 10),
    event(165.0, "validated", 15, loss=1.0, seconds=5.0),
    event(175.0, "run_finished", 20),
    # the next session, an hour later
    event(3775.0, "run_started", processes=4, resumed=True),
    event(3785.0, "resumed", 20),
    event(3785.0, "compute_started", 20),
    event(3806.0, "run_finished", 30),
]


def write(folder: Path, events: list[dict[str, Any]], steps: int = 30, step_s: Any = 2.0) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    rows = [{"step": step, "loss": 1.0, "step_s": step_s} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_the_wall_time_of_a_killed_and_resumed_run_is_divided(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    found = compute_goodput(tmp_path)
    assert found.parts() == pytest.approx({
        "committed": 60.0, "skipped": 0.0, "start": 10.0 + 8.0 + 10.0, "validation": 5.0,
        "saves": 0.0, "lost": 11.0, "between": 1.0 + 3600.0, "other": 1.0,
    })  # fmt: skip
    assert found.wall_s == pytest.approx(3806.0 - 100.0)
    assert (found.steps, found.starts, found.ranks) == (30, 3, 4)
    assert found.lost_steps == 6, "11 s at 2 s a step"
    assert found.share == pytest.approx(60.0 / 3706.0)
    assert found.device_hours == pytest.approx(4 * 105.0 / 3600)


def write_ranks(folder: Path, ends_s: dict[int, float], node: int) -> None:
    """Records of two ranks, whose steps of two seconds end at these times."""
    (folder / "rank_steps").mkdir(exist_ok=True)
    seconds = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rows = [RankStep(n, rank, 1, at, 0, seconds) for n, at in ends_s.items() for rank in (0, 1)]
    text = encode_header(node) + b"".join(row.encode() for row in rows)
    (folder / f"rank_steps/node-{node}.bin").write_bytes(text)


def test_a_loop_of_ones_own_has_its_starts_from_the_ranks(tmp_path: Path) -> None:
    """It writes neither a start nor when training begins: all was counted as a start."""
    write(tmp_path, [event(140.0, "spike", 20)])
    (tmp_path / "ranks.json").write_text('{"time_s": 95.0, "ranks": [{"rank": 0}, {"rank": 1}]}')
    write_ranks(tmp_path, {step: 100.0 + 2 * step for step in range(1, 31)}, 0)
    found = compute_goodput(tmp_path)
    parts = {"committed": 60.0, "start": 5.0}
    assert {name: s for name, s in found.parts().items() if s} == pytest.approx(parts)
    assert (found.starts, found.ranks, found.steps) == (1, 2, 30)
    # It is killed in step 15, and goes on from step 10 an hour later.
    write(tmp_path, [event(125.0, "checkpoint_saved", 10), event(3700.0, "resumed", 10)])
    (tmp_path / "ranks.json").write_text('{"time_s": 3695.0, "ranks": [{"rank": 0}]}')
    write_ranks(tmp_path, {step: 100.0 + 2 * step for step in range(1, 11)}, 0)
    write_ranks(tmp_path, {step: 3690.0 + 2 * step for step in range(11, 31)}, 1)
    found = compute_goodput(tmp_path)
    assert (found.starts, found.committed_s) == (2, pytest.approx(60.0))
    assert found.parts()["between"] == pytest.approx(3695.0 - 125.0)
    assert found.parts()["start"] == pytest.approx(15.0)
    write(tmp_path, [event(140.0, "spike", 20)])
    for path in (tmp_path / "rank_steps").iterdir():
        path.unlink()
    assert compute_goodput(tmp_path).text() == "", "nothing tells when its steps were made"


def test_the_time_before_a_first_step_is_of_the_start(tmp_path: Path) -> None:
    """A loop's own set-up and the first batch lie in the first row of each session."""
    write(tmp_path, KILLED)
    text = (tmp_path / "metrics.jsonl").read_text()
    waits = {1: 1.5, 2: 1.0, 11: 0.5, 21: 9.0}
    for step, wait_s in waits.items():
        text = text.replace(f'"step": {step},', f'"step": {step}, "data_wait_s": {wait_s},')
    before = compute_goodput(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text)
    found = compute_goodput(tmp_path)
    moved_s = 1.5 + 0.5 + 2.0  # at most the step; step 2 is no first one
    assert found.committed_s == pytest.approx(before.committed_s - moved_s)
    assert found.start_s == pytest.approx(before.start_s + moved_s)
    assert found.wall_s == pytest.approx(before.wall_s)
    write(tmp_path, [event(140.0, "spike", 20)], step_s=2.0)
    rows = (tmp_path / "metrics.jsonl").read_text().replace('"step_s": 2.0', '"step_s": 42.0', 1)
    (tmp_path / "metrics.jsonl").write_text(rows.replace("{", '{"data_wait_s": 41.0, ', 1))
    (tmp_path / "ranks.json").write_text('{"time_s": 60.0, "ranks": [{"rank": 0}, {"rank": 1}]}')
    write_ranks(tmp_path, {step: 100.0 + 2 * step for step in range(1, 31)}, 0)
    found = compute_goodput(tmp_path)
    assert (found.start_s, found.committed_s) == (pytest.approx(41.0), pytest.approx(59.0))


def test_skipped_steps_are_not_committed(tmp_path: Path) -> None:
    skips = [event(120.0 + step, "step_skipped", step) for step in (3, 4)]
    write(tmp_path, [*KILLED[:2], *skips, event(175.0, "run_finished", 30)])
    parts = compute_goodput(tmp_path).parts()
    assert (parts["committed"], parts["skipped"], parts["lost"]) == (56.0, 4.0, 0.0)


def test_a_skipped_first_step_is_counted_once(tmp_path: Path) -> None:
    """Its wait is of the start; it was taken from the committed steps for the skip once more."""
    skip = event(121.0, "step_skipped", 1)
    write(tmp_path, [*KILLED[:2], skip, event(175.0, "run_finished", 30)])
    whole = compute_goodput(tmp_path).parts()
    assert (whole["committed"], whole["skipped"]) == (58.0, 2.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step": 1, "data_wait_s": 1.5,', 1))
    parts = compute_goodput(tmp_path).parts()
    assert (parts["committed"], parts["skipped"]) == (58.0, 0.5)
    assert parts["start"] == pytest.approx(whole["start"] + 1.5)


def test_parts_add_up_for_damaged_and_hostile_folders(tmp_path: Path) -> None:
    assert compute_goodput(tmp_path).wall_s == 0.0
    drawn = random.Random(3)
    odd = [None, [], {}, "x", -1, 1e308, True, 10**400, float("nan"), 7]
    for _ in range(60):
        events = [dict(one) for one in KILLED]
        for one in drawn.sample(events, 4):
            one[drawn.choice(["step", "seconds", "time_s", "processes"])] = drawn.choice(odd)
        drawn.shuffle(events)
        write(tmp_path, events, step_s=drawn.choice([2.0, 1e6, "x", None, -3.0]))
        found = compute_goodput(tmp_path)
        assert found.wall_s == pytest.approx(sum(found.parts().values()))
        assert all(seconds >= 0 for seconds in found.parts().values())
