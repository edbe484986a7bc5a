"""The report at the end of a run: when, where, by whom, and that it never fails a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_verdict import make_run
from typer.testing import CliRunner

from shoal.checkpoint.format.manifest import FILE_NAME
from shoal.cli import ending, start
from shoal.cli.main import app
from shoal.launch import RunOutcome, end_report
from shoal.report import report_page
from shoal.report.order_statistics import distinct, median, percentile


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report ends its process, so it sets variables of numpy there."""
    for name, value in end_report.ONE_THREAD.items():
        monkeypatch.setenv(name, value)


def test_a_report_loads_neither_rich_nor_torch(tmp_path: Path) -> None:
    """Most of what a report of a short run costs is its imports; numpy's own masked arrays too."""
    make_run(tmp_path)
    program = (
        "import sys, pathlib, shoal.report.report_page as page; print(*sys.modules)\n"
        "page.write_report(pathlib.Path(sys.argv[1])); print(*sys.modules)"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    imported, used = (set(line.split()) for line in done.stdout.splitlines())
    assert {"rich", "torch", "numpy", "msgspec", "typer"} & imported == set()
    assert "shoal.report.report_page" in imported
    assert "numpy" in used
    assert {"numpy.ma", "torch", "rich"} & used == set()


def test_medians_and_percentiles_are_numpys() -> None:
    drawn = np.random.default_rng(0)
    for shape in ((1,), (6,), (7, 4), (2, 5, 3)):
        for kind in (np.float64, np.float32, np.int64):
            values = (drawn.normal(size=shape) * 9).astype(kind)
            assert np.array_equal(distinct(values), np.unique(values))
            for axis in (None, *range(len(shape))):
                assert np.array_equal(median(values, axis), np.median(values, axis))
                for share in (0, 50, 90, 100, [50, 99]):
                    true = np.percentile(values, share, axis=axis)
                    assert np.array_equal(percentile(values, share, axis), true)
                below = np.percentile(values, 95, axis=axis, method="lower")
                assert np.array_equal(percentile(values, 95, axis, lower=True), below)
    gaps = np.array([[1.0, np.nan, 2.0], [1.0, 2.0, 3.0]])
    assert np.array_equal(median(gaps, 1), [np.nan, 2.0], equal_nan=True)
    assert np.isnan(median([]))


def write_steps(folder: Path, steps: int, step_s: float) -> None:
    rows = [{"step": n, "loss": 1.0, "step_s": step_s, "tokens": 8} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(folder: Path, steps: int, step_s: float) -> Path:
    write_steps(folder, steps, step_s)
    (folder / "events.jsonl").write_text('{"event": "run_started", "time_s": 1.8e9}\n')
    return folder


@pytest.mark.parametrize(
    ("steps", "step_s", "written"), [(40, 0.2, True), (19, 9.0, False), (40, 0.01, False)]
)
def test_a_run_of_some_seconds_ends_with_its_report(
    steps: int, step_s: float, written: bool, tmp_path: Path
) -> None:
    line = ending.write_end_report(write_rows(tmp_path, steps, step_s))
    path = tmp_path / "report.html"
    assert line == (f"report: {path}" if written else "")
    assert path.exists() == written


def test_a_huge_run_is_told_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_report, "REPORT_BYTES", 100)
    assert (
        ending.write_end_report(write_rows(tmp_path, 40, 1.0)) == f"report: shoal report {tmp_path}"
    )


def test_a_report_that_fails_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> Path:
        raise RuntimeError("of any kind")

    monkeypatch.setattr(report_page, "write_report", fail)
    assert ending.write_end_report(write_rows(tmp_path, 40, 1.0)) == (
        f"report: not written (RuntimeError: of any kind); try: shoal report {tmp_path}"
    )
    assert ending.write_end_report(tmp_path / "nothing") == ""
    gone = tmp_path / "gone"
    assert report_page.write_end_report(gone) == f"report: not written, {gone} is gone"


def test_a_short_run_of_islands_names_the_command_that_lists_its_owners(tmp_path: Path) -> None:
    saved = tmp_path / "island-0" / "checkpoints" / "step-10"
    saved.mkdir(parents=True)
    write_rows(tmp_path / "island-0", 10, 0.01)
    assert ending.write_end_report(tmp_path) == "", "before its first checkpoint"
    (saved / FILE_NAME).write_text("{}")
    assert ending.write_end_report(tmp_path) == f"report: shoal report {tmp_path}"


def test_a_run_of_islands_is_measured_by_its_islands(tmp_path: Path) -> None:
    """The launcher's own folder of such a run has no steps."""
    write_rows(tmp_path, 0, 1.0)
    (tmp_path / "metrics.jsonl").unlink()
    for number, steps in enumerate((3, 40)):
        (tmp_path / f"island-{number}").mkdir()
        write_rows(tmp_path / f"island-{number}", steps, 0.5)
    path = tmp_path / "report.html"
    assert ending.write_end_report(tmp_path) == f"report: {path}"
    assert "island-1" in path.read_text()


def watch_to_the_end(folder: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """Run a watchdog of one rank, a process that sleeps; return it after its end."""
    rank = subprocess.Popen(["sleep", "0.2"])
    node = {"ranks": [0], "pids": [rank.pid], "host": "here"}
    first = {"folder": str(folder), "number": 0, "nodes": [node], "at": None, "token": "x"}
    words = [first, *({"further": str(one)} for one in more)]
    done = subprocess.run(
        [sys.executable, "-m", "shoal.launch.watchdog", "1"],
        input="".join(json.dumps(one) + "\n" for one in words),
        env={**os.environ, "TMPDIR": str(folder.parent)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    rank.wait()
    return done


def test_the_watchdog_writes_the_reports_of_the_runs_that_it_watched(tmp_path: Path) -> None:
    """Of both runs of a process; a short one gets none, a damaged one a line and no status."""
    folders = [tmp_path / name for name in ("first", "second", "short", "odd")]
    for folder in folders:
        folder.mkdir()
        write_rows(folder, 3 if folder.name == "short" else 40, 0.5)
    (folders[3] / "report.html").mkdir()
    done = watch_to_the_end(*folders)
    assert done.returncode == 0
    assert [(one / "report.html").is_file() for one in folders] == [True, True, False, False]
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("shoal: report")]
    assert line.startswith("shoal: report: ")
    assert "odd" in line


def test_the_command_says_where_the_page_is_and_refuses_other_folders(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    folder = write_rows(tmp_path / "mine", 30, 0.1)
    done = CliRunner().invoke(app, ["report", str(folder), "--json"])
    found = json.loads(done.stdout)
    assert found["path"] == str(folder / "report.html")
    assert found["bytes"] == (folder / "report.html").stat().st_size
    assert found["verdict"].startswith("nothing")
    done = CliRunner().invoke(
        app, ["report", str(folder), "--out", str(tmp_path / "no" / "x.html")]
    )
    assert "cannot be written" in str(done.exception)
    assert "try: " in str(done.exception)
    done = CliRunner().invoke(app, ["report", str(folder.parent)])
    shown = f"is no run folder, but holds a run; try: {folder}, or shoal runs {folder.parent}"
    assert shown in str(done.exception)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "no")])
    assert f"{tmp_path / 'no'}: does not exist; try: shoal runs" in str(done.exception)
    (begun := tmp_path / "begun").mkdir()
    (begun / "owner.json").write_text("{}")
    done = CliRunner().invoke(app, ["report", str(begun)])
    assert f"{begun}: has not begun: no event, no step; try: shoal watch {begun}" in str(
        done.exception
    )


def test_shoal_train_prints_the_report_before_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = start.prepare_run(["model.name=mlp", "data.source=digits", "run.name=x"], None)

    def supervise(*_: Any, emit: Any, **__: Any) -> RunOutcome:
        emit("compute_started")
        write_steps(prepared.folder, 40, 0.5)
        emit("run_finished", step=40, how="completed")
        return RunOutcome("finished", 0, 1, "")

    monkeypatch.setattr(start, "supervise", supervise)
    start.launch_run(prepared, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("report: runs/x/report.html") < lines.index("run folder: runs/x")
    assert Path("runs/x/report.html").stat().st_size > 50_000
