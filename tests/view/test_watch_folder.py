"""What `shoal watch` reads of a run folder: growing, resumed, replaced, damaged, huge; read only."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from watched_runs import (
    BEGAN_S,
    make_run,
    rank_row,
    step_row,
    write_event,
    write_ranks,
    write_steps,
)

from shoal.base.runlog.rank_records import FOLDER, RankStep, encode_header
from shoal.view.watch import loss_history, rank_tail
from shoal.view.watch.rank_tail import RankTail, compute_lateness_s
from shoal.view.watch.run_watcher import IslandsWatcher, RunWatcher
from shoal.view.watch.styled_lines import line_text
from shoal.view.watch.watch_screen import VIEWS, ScreenOptions, render_screen, render_snapshot
from shoal.view.watch.watch_state import WatchedRun


def losses(run: WatchedRun) -> list[tuple[int, float]]:
    return [(point.step, point.loss) for point in run.points]


def test_it_waits_for_a_folder_and_then_for_a_run_in_it(tmp_path: Path) -> None:
    watcher = RunWatcher(tmp_path / "soon")
    assert watcher.read().message == f"no such folder yet; waiting for {tmp_path}/soon"
    (tmp_path / "soon").mkdir()
    assert watcher.read().message == f"no run in it yet; waiting for {tmp_path}/soon"
    make_run(tmp_path / "soon", steps=0)
    run = watcher.read()
    assert (run.message, run.row is not None, len(run.points)) == ("", True, 0)
    write_steps(tmp_path / "soon", range(1, 4))
    write_ranks(tmp_path / "soon", range(1, 4), {})
    run = watcher.read()
    assert [step for step, _ in losses(run)] == [1, 2, 3]
    assert [(rank.name, rank.step) for rank in run.ranks] == [(str(k), 3) for k in range(4)]


def test_a_resume_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", steps=30)
    watcher = RunWatcher(folder)
    watcher.read()
    kept = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:20]
    (folder / "metrics.jsonl").write_text("".join(kept))
    write_event(folder, "run_started", resumed=True)
    write_event(folder, "resumed", step=20)
    write_steps(folder, range(21, 24), loss=9.0)
    write_ranks(folder, range(21, 24), {})
    run = watcher.read()
    assert [step for step, _ in losses(run)] == list(range(1, 24))
    assert losses(run)[19:21] == [(20, step_row(20)["loss"]), (21, 9.0)]
    assert run.progress.last is not None
    assert run.progress.last["step"] == 23
    assert {rank.step for rank in run.ranks} == {23}
    for own in watcher.tail.rows.values():
        assert [one.step for one in own] == list(range(23 - len(own) + 1, 24))


def test_a_deleted_folder_stays_on_the_screen_and_another_in_its_place_is_new(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "mine", steps=30)
    watcher = IslandsWatcher(folder)
    watcher.read()
    folder.rename(tmp_path / "away")
    run = watcher.read()
    assert "was deleted" in run.message
    assert len(run.points) == 30
    make_run(folder, steps=0)
    write_steps(folder, range(41, 44))
    write_ranks(folder, range(41, 44), {}, ranks=2)
    run = watcher.read()
    assert (run.message, [step for step, _ in losses(run)]) == ("", [41, 42, 43])
    assert [(rank.name, rank.step) for rank in run.ranks] == [("0", 43), ("1", 43)]


def test_of_a_long_run_a_few_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "mine", steps=0)
    write_steps(folder, range(1, 6001))
    write_ranks(folder, range(1, 6001), {})
    parsed: list[bytes] = []
    real = loss_history.parse_step
    monkeypatch.setattr(loss_history, "parse_step", lambda line: parsed.append(line) or real(line))
    watcher = RunWatcher(folder)
    run = watcher.read()
    assert 0 < len(parsed) <= loss_history.SAMPLES
    steps = [step for step, _ in losses(run)]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 6000)
    for step, loss in losses(run):
        assert loss == step_row(step)["loss"]
    rows = sum(map(len, watcher.tail.rows.values()))
    assert rows == 4 * rank_tail.WINDOW, "of 24,000 rows"


def test_a_history_keeps_its_first_and_last_step_however_long_it_gets() -> None:
    history = loss_history.LossHistory()
    for step in range(1, 20_001):
        history.add([step_row(step)])
    steps = [point.step for point in history.points]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 20_000)
    assert len(steps) <= loss_history.MOST_POINTS


def read_bytes(path: Path, monkeypatch: pytest.MonkeyPatch, tail: RankTail) -> int:
    """Bytes that one reading takes from a file."""
    total = 0
    real = Path.open

    def counted(self: Path, *args: Any, **named: Any) -> Any:
        file = real(self, *args, **named)
        if self == path:
            read = file.read

            class Counted:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def seek(self, place: int) -> int:
                    return int(file.seek(place))

                def read(self, size: int = -1) -> bytes:
                    nonlocal total
                    found = read(size)
                    total += len(found)
                    return bytes(found)

            return Counted()
        return file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", counted)
        tail.read()
    return total


def test_only_the_end_of_rank_records_is_read_and_then_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ranks(tmp_path, range(1, 4001), {}, ranks=4)
    path = tmp_path / FOLDER / "node-0.bin"
    assert path.stat().st_size > 3 * rank_tail.ROWS * 64
    tail = RankTail(tmp_path)
    assert 64 < read_bytes(path, monkeypatch, tail) <= 64 + rank_tail.ROWS * 64
    assert read_bytes(path, monkeypatch, tail) == 0
    write_ranks(tmp_path, range(4001, 4002), {}, ranks=4)
    assert read_bytes(path, monkeypatch, tail) == 64 + 4 * 64
    assert {own[-1].step for own in tail.rows.values()} == {4001}
    with path.open("ab") as file:
        file.write(rank_row(4002, 0, 0, 0).encode()[:40])
    assert not tail.read(), "half a row"


def test_rank_records_of_several_nodes_damaged_or_strange(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    nan = RankStep(3, 5, 1, math.nan, 1, (math.nan, math.inf, -0.5, 1e30, 0, 0, 0, 0.25))
    huge = RankStep(3, 1 << 31, 1, 0.0, 1, (0.0,) * 8)
    (folder / "node-1.bin").write_bytes(
        encode_header(1) + nan.encode() + huge.encode() + bytes(64) + b"torn"
    )
    (folder / "node-2.bin").write_bytes(b"something else" * 20)
    (folder / "node-3.bin").write_bytes(b"")
    (folder / "node-4.bin").mkdir()
    tail = RankTail(tmp_path)
    assert tail.read()
    (only,) = tail.rows[5]
    assert list(tail.rows) == [5]
    assert only.seconds == (0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.25)
    assert tail.nodes == {5: 1}


def test_lateness_is_what_the_others_wait_longer() -> None:
    rows = {
        rank: deque(rank_row(step, rank, late_s, 0.1) for step in range(1, 6))
        for rank, late_s in enumerate((0.0, 0.1, 0.02, 0.0))
    }
    late_s = compute_lateness_s(rows)
    assert late_s == pytest.approx({0: 0.0, 1: 0.1, 2: 0.02, 3: 0.0}, abs=1e-6)
    assert compute_lateness_s({0: rows[1]}) == {0: 0.0}, "nobody else waits"
    three = {
        rank: deque([rank_row(1, rank, late_s, 0.3)])
        for rank, late_s in ((0, 0), (1, 0.1), (2, 0.3))
    }
    assert compute_lateness_s(three) == pytest.approx({0: 0, 1: 0, 2: 0.25}, abs=1e-6)
    many = {rank: deque([rank_row(1, rank, 0.1 * (rank == 7), 0.1)]) for rank in range(100)}
    assert {rank for rank, late in compute_lateness_s(many).items() if late > 0.09} == {7}


HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\u202egnp",
    "a\rb\nc",
    "<script>",
    "\ud800",
    "漢\u0301" * 80,
]


def is_clean(run: WatchedRun) -> bool:
    for width, height in ((80, 24), (200, 60), (30, 8)):
        screens = [
            render_screen(run, width, height, ScreenOptions(view=view), 1e9) for view in VIEWS
        ]
        for line in (line for one in screens for line in one):
            assert all(letter.isprintable() for letter in line_text(line)), line
    assert render_snapshot(run, 80, ScreenOptions(), 1e9)
    return True


def test_hostile_and_damaged_files_are_shown_without_a_control_character(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a\x1b[2J", steps=3)
    for text in HOSTILE:
        write_event(folder, "notice", text=text)
        write_event(folder, "worker_died", rank=text, pid=text, how=text, traceback=text)
        write_event(folder, "hang", rank=2, host=text, phase=text, waited_s="x")
        write_event(folder, "validated", step=text, loss=text)
        write_event(folder, text, rank=[text])
    write_event(folder, "notice", text="late", time_s=1e300)
    write_event(folder, "run_started", time_s=1e300)
    write_event(folder, "validated", step=3)
    write_event(folder, "run_finished", how=HOSTILE[0])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "loss": "x"}\n{"step": 1e400}\n[]\n\xff\xfe\n{"step": 5')
        file.write(b'"loss": {}}\n{"step": 7, "tokens": 5, "step_s": 1e-320}\n')
        file.write(b'"loss": {}}\n{"step": 6, "loss": null, "step_s": -1, "lr": 1e308}\nhalf')
    ranks = [{"rank": 0, "host": HOSTILE[1], "device": [3]}, {"rank": 1e300}, {"rank": -1}]
    (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    (folder / "phase.json").write_text(json.dumps({"time_s": 2e9, "phases": [
        {"name": HOSTILE[1], "of": 3, "done": 1, "began_s": 1e9},
        {"name": "x", "of": 0, "done": 0, "began_s": 10**400}]}))  # fmt: skip
    for plan in (
        "[1, 2]", '{"layout": {"pp": "x", "servers": -1, "dp_shard": true}, "steps": "many"}',
        json.dumps({"layout": HOSTILE[1], "predicted": {"step_s": "1"}, "unit": HOSTILE[0]}),
        '{"steps": 1%s}' % ("0" * 400),
        '{"layout": {"pp": 0, "tp": 9999999999999999999}, "steps": -3, "predicted": [1]}',
    ):  # fmt: skip
        (folder / "plan.json").write_text(plan)
        assert is_clean(IslandsWatcher(folder).read())


def snapshot_files(folder: Path) -> dict[str, tuple[int, int]]:
    found = [folder, *folder.rglob("*")]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ctime_ns) for p in found}


def test_nothing_is_written_to_the_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", rank_1=0.01)
    before = snapshot_files(folder)
    watcher = IslandsWatcher(folder)
    for _ in range(3):
        assert is_clean(watcher.read())
    assert snapshot_files(folder) == before
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for path in (copy, copy / FOLDER):
        path.chmod(0o500)
    try:
        assert len(IslandsWatcher(copy).read().ranks) == 4
    finally:
        for path in (copy, copy / FOLDER):
            path.chmod(0o700)


def test_files_that_cannot_be_read_are_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", steps=3)
    for name in ("metrics.jsonl", "plan.json", "ranks.json", "phase.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    run = RunWatcher(folder).read()
    assert (len(run.points), len(run.ranks)) == (0, 4)
    os.rmdir(folder / "metrics.jsonl")
    assert is_clean(RunWatcher(folder).read())


def test_a_loop_of_ones_own_is_shown_before_its_first_event(tmp_path: Path) -> None:
    """It writes its first event at a save or a validation, an epoch after its first step."""
    began = {"time_s": BEGAN_S - 30, "ranks": [{"rank": 0, "host": "a", "pid": 1}]}
    (tmp_path / "ranks.json").write_text(json.dumps(began))
    watcher = RunWatcher(tmp_path)
    assert watcher.read().row is not None
    write_steps(tmp_path, range(1, 8))
    state = RunWatcher(tmp_path).read()
    assert state.progress.last is not None
    assert state.progress.last["step"] == 7
    assert state.row is not None
    assert (state.row.step, state.row.started_s) == (7, BEGAN_S - 30)
    write_event(tmp_path, "validated", step=7, loss=2.0)
    state = watcher.read()
    assert state.progress.last is not None
    assert state.progress.last["step"] == 7
    row = RunWatcher(tmp_path).read().row
    assert row is not None
    assert row.started_s == BEGAN_S - 30, "not when its first event was"
