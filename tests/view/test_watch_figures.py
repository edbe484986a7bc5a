"""Figures of a watched run: one window, waits with their rank, far forecasts, the time left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from watched_runs import BEGAN_S, PLAN, make_run, step_row, write_event, write_ranks

from shoal.base.text.forecast_text import plan_comment
from shoal.view.progress import RunProgress
from shoal.view.run_table import list_runs, table_lines
from shoal.view.summary import summarise_run
from shoal.view.watch.figure_texts import forecast_texts, left_texts
from shoal.view.watch.run_watcher import RunWatcher
from shoal.view.watch.styled_lines import line_text
from shoal.view.watch.watch_screen import ScreenOptions, render_snapshot
from shoal.view.watch.watch_state import StepPoint


def progress_of(
    step_s: float, *, steps: int = 20, total: int = 200, foreseen_s: float = 1.0
) -> RunProgress:
    progress = RunProgress(total)
    progress.plan = {**PLAN, "predicted": {"step_s": foreseen_s}}
    progress.add([step_row(n, step_s=step_s) for n in range(1, steps + 1)], cut_back=False)
    return progress


def test_rows_rate_and_forecast_are_means_of_the_same_steps(tmp_path: Path) -> None:
    run = RunWatcher(make_run(tmp_path / "mine", rank_1=0.02)).read()
    mean_s = run.progress.mean("step_s")
    assert mean_s is not None
    assert run.progress.rate() == pytest.approx(2048 / mean_s)
    assert run.forecast[0] == "step 200.0 ms → 250.0 ms (1.25 ×)"
    assert [round(rank.step_s, 3) for rank in run.ranks] == [0.225] * 4


def test_the_first_step_after_a_restart_is_in_no_mean(tmp_path: Path) -> None:
    """Its seconds have what went before it: restoring, compiling."""
    folder = make_run(tmp_path / "mine", steps=10)
    write_event(folder, "restarting", attempt=1, of=3, saved=10)
    write_event(folder, "resumed", step=10)
    write_ranks(folder, range(11, 12), {0: 5.0})
    write_ranks(folder, range(12, 15), {})
    assert [round(rank.step_s, 3) for rank in RunWatcher(folder).read().ranks] == [0.205] * 4


def test_a_wait_names_the_rank_that_it_is_for(tmp_path: Path) -> None:
    late = RunWatcher(make_run(tmp_path / "late", rank_1=0.04)).read()
    assert late.waits[0] == "communication 50.0 ms (20%), for rank 1: data"
    assert late.waits[1] == "data 10.0 ms (4%)"
    alike = RunWatcher(make_run(tmp_path / "alike")).read()
    assert alike.waits[0] == "communication 50.0 ms (20%)"
    own = RunWatcher(make_run(tmp_path / "own", rank_0=0.04)).read()
    assert "for rank" not in own.waits[0], "rank 0 does not wait for itself"


@pytest.mark.parametrize(
    ("foreseen_s", "comment"),
    [
        (29.1, "forecast far off: the machine was busy when it was measured; try: shoal doctor"),
        (0.01, "forecast far off: the machine is slower now than measured; try: shoal doctor"),
        (0.5, ""),
        (0.0, ""),
    ],
)
def test_a_forecast_that_is_far_off_has_a_comment(foreseen_s: float, comment: str) -> None:
    progress = progress_of(1.0, foreseen_s=foreseen_s)
    assert plan_comment(progress.plan, progress.mean("step_s")) == comment
    assert len(comment) < 80
    assert bool(forecast_texts(progress, ())) == bool(foreseen_s)


def points_of(*step_s: float) -> list[StepPoint]:
    """Points of blocks of 32 steps, each with its pace."""
    return [StepPoint(n, 1.0, 1.0, s) for s in step_s for n in range(32)]


def test_the_time_left_is_a_range_where_the_pace_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    steady, now_s = progress_of(1.0), BEGAN_S
    three = ("3 min 00 s left", "")
    assert left_texts(steady, points_of(*[1.0] * 8), [], now_s) == three
    assert left_texts(steady, points_of(1.0), [], now_s) == three, "too few points"
    varied = points_of(0.5, 1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 9.0)
    assert left_texts(steady, varied, [], now_s) == ("3–6 min left", "")
    long = progress_of(1.0, total=72_020)
    assert left_texts(long, [], [], now_s) == ("20 h 00 min left", "steps done 19 Nov 07:06")
    assert left_texts(long, varied, [], now_s) == (
        "20–40 h left",
        "steps done 19 Nov 07:06 to 20 Nov 03:06",
    )
    announced = [{"event": "notice", "text": "validation at the end: 8 held-out samples"}]
    done = left_texts(long, [], announced, now_s)[1]
    assert done == "steps done 19 Nov 07:06, then a validation"
    assert left_texts(RunProgress(None), [], [], now_s) == ("", "")


def test_the_time_left_counts_the_validations_to_come() -> None:
    """The last one at the end counts too; the interval follows from those that were made."""
    progress = progress_of(1.0, total=100)
    first = {"event": "validated", "step": 10, "seconds": 30.0}
    second = {**first, "step": 20, "seconds": 10.0}
    assert left_texts(progress, [], [first], BEGAN_S)[0] == "1 min 50 s left"
    assert left_texts(progress, [], [first, second], BEGAN_S)[0] == "2 min 40 s left"
    damaged = [{"event": "validated", "step": "x", "seconds": None}]
    assert left_texts(progress, [], damaged, BEGAN_S)[0] == "1 min 20 s left"


def test_a_snapshot_shows_a_stop_before_many_saves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    write_event(folder, "stop_requested", signal="SIGINT", steps=True, step_s=0.1)
    for step in range(20, 60):
        write_event(folder, "checkpoint_saved", step=step, bytes=5, seconds=1)
    run = RunWatcher(folder).read()
    shown = "\n".join(map(line_text, render_snapshot(run, 80, ScreenOptions(), BEGAN_S)))
    assert "Ctrl-C" in shown
    assert shown.count("checkpoint saved: ") == 1
    assert "step-59" in shown


def test_a_resume_that_trains_no_step_says_so_everywhere(tmp_path: Path) -> None:
    """A resume whose train.steps is passed already is complete, but trained nothing."""
    folder = make_run(tmp_path / "mine", steps=60)
    (folder / "plan.json").write_text(json.dumps({**PLAN, "steps": 40}))
    write_event(folder, "run_finished", step=60, how="stopped on request")
    write_event(folder, "run_started", processes=4, resumed=True)
    write_event(folder, "resumed", step=60)
    write_event(folder, "compute_started", step=60)
    write_event(folder, "run_finished", step=60, how="completed", steps_here=0)
    line = "0 steps: step 60 is not below train.steps = 40; try: train.steps=100"
    row = list_runs(folder, BEGAN_S)[0]
    assert (row.state, row.how) == ("ended", f"completed; {line}")
    assert "60/40" in table_lines([row], None, BEGAN_S)[1]
    assert " ".join(summarise_run(folder).split()).startswith(f"completed at step 60; {line}")
    shown = "\n".join(
        map(line_text, render_snapshot(RunWatcher(folder).read(), 120, ScreenOptions(), BEGAN_S))
    )
    assert "step 60/40" in shown
    assert "100%" not in shown
    assert "resumed from step-60" in shown
    assert "at step 60" not in shown
