"""`shoal runs`: sixteen folders in every state, on a clock of one's own, copied, damaged, of old versions."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.base.runlog.events import append_line
from shoal.checkpoint.format.lease import Owner
from shoal.cli.main import app
from shoal.view import run_table
from shoal.view.run_table import RunRow, list_runs, read_row, table_lines

NOW_S = time.time()
START = {"event": "run_started", "time_s": NOW_S - 50, "step": None}
RESUMED = {"event": "resumed", "time_s": NOW_S - 40, "step": 7}
HANG = {"event": "hang", "time_s": NOW_S - 3, "step": 3, "rank": 1}
DIED = {"event": "worker_died", "time_s": NOW_S - 3, "fatal": True, "how": "SIGKILL"}
END = {"event": "run_finished", "time_s": NOW_S - 2, "step": 3, "how": "completed"}
STOP = {"event": "run_finished", "time_s": NOW_S - 2, "step": 3, "how": "stopped on request"}
AWAY = Owner("x", 1, "elsewhere", NOW_S, "another boot", 5)


def gone() -> Owner:
    """A process of this machine that has ended."""
    return replace(Owner.this_process("x"), pid=2**22 + 1, born=12345)


def make(
    folder: Path,
    *events: dict[str, Any],
    steps: int = 3,
    owner: Owner | None = None,
    age_s: float = 1.0,
) -> Path:
    """A run folder as a run leaves it, its files as old as said."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(
        json.dumps({"layout": {"dp_replicate": 2}, "steps": 10, "unit": "tokens"})
    )
    for event in events:
        append_line(folder / "events.jsonl", event)
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 - step, "tokens": 100, "step_s": 0.5}
        append_line(folder / "metrics.jsonl", row)
    (folder / "owner.lock").touch()
    if owner is not None:
        (folder / "owner.json").write_text(json.dumps(asdict(owner)))
    for path in (folder, *folder.iterdir()):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return folder


@pytest.fixture
def held() -> Iterator[Any]:
    """Holds the lock of a folder, as its run does."""
    files = []

    def hold(folder: Path) -> Path:
        files.append((folder / "owner.lock").open("a"))
        fcntl.flock(files[-1], fcntl.LOCK_EX)
        return folder

    yield hold
    for file in files:
        file.close()


def states(folder: Path) -> dict[str, str]:
    """Name → state."""
    return {row.name: row.state for row in list_runs(folder, NOW_S)}


def test_sixteen_folders_are_told_apart(tmp_path: Path, held: Any) -> None:
    here = Owner.this_process("x")
    held(make(tmp_path / "starting", START, steps=0, owner=here))
    held(make(tmp_path / "resuming", START, RESUMED, steps=7, owner=here))
    held(make(tmp_path / "running", START, owner=here))
    held(make(tmp_path / "again", START, END, START, owner=here))
    held(make(tmp_path / "silent", START, owner=here, age_s=300))
    held(make(tmp_path / "hung", START, HANG, owner=here, age_s=300))
    held(make(tmp_path / "recovered", START, {**HANG, "step": 2}, owner=here))
    make(tmp_path / "ended", START, END)
    make(tmp_path / "stopped", START, STOP)
    make(tmp_path / "closed", START)
    make(tmp_path / "killed", START, owner=gone())
    make(tmp_path / "died", START, DIED)
    make(tmp_path / "there", START, owner=AWAY)
    make(tmp_path / "there-silent", START, owner=AWAY, age_s=4000)
    make(tmp_path / "there-gone", START, owner=AWAY, age_s=90_000)
    shutil.copytree(tmp_path / "running", tmp_path / "copied")
    assert states(tmp_path) == {
        **{"starting": "starting", "resuming": "starting", "running": "running"},
        **{"again": "running", "silent": "silent", "hung": "hung", "recovered": "running"},
        **{"ended": "ended", "stopped": "stopped", "closed": "ended", "killed": "killed"},
        **{"died": "killed", "there": "running", "there-silent": "silent"},
        **{"there-gone": "abandoned", "copied": "abandoned"},
    }


def test_a_clock_an_hour_off_does_not_matter_to_a_run_of_this_machine(
    tmp_path: Path, held: Any
) -> None:
    held(make(tmp_path / "ahead", START, owner=Owner.this_process("x"), age_s=-3600))
    [row] = list_runs(tmp_path, NOW_S)
    assert row.state == "running"
    assert " now " in "\n".join(table_lines([row], 200, NOW_S))


def test_a_run_with_slow_steps_is_not_silent_soon(tmp_path: Path, held: Any) -> None:
    folder = make(tmp_path / "slow", START, steps=0, owner=Owner.this_process("x"))
    append_line(folder / "metrics.jsonl", {"step": 1, "loss": 1.0, "tokens": 1, "step_s": 90.0})
    for path in (folder, *folder.iterdir()):
        os.utime(path, (NOW_S - 500, NOW_S - 500))
    held(folder)
    assert states(tmp_path) == {"slow": "running"}


def test_looking_never_takes_the_lock(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", START)
    before = (folder / "owner.lock").stat().st_mtime
    list_runs(tmp_path, NOW_S)
    assert (folder / "owner.lock").stat().st_mtime == before
    assert not (folder / "owner.json").exists()


def test_a_damaged_folder_is_a_row(tmp_path: Path) -> None:
    folder = make(tmp_path / "bad\x1b[31m", START)
    for name in ("plan.json", "metrics.jsonl", "events.jsonl", "owner.json"):
        (folder / name).write_bytes(b'{"event": \xff\x00 "step": [1\n{"step": "x"}\n')
    [row] = list_runs(tmp_path, NOW_S)
    assert (row.state, row.step, row.loss, row.layout) == ("damaged", 0, None, "")
    assert row.how == "events.jsonl: no line of it can be read"
    assert "\x1b" not in "\n".join(table_lines([row], 80, NOW_S))


def a_row(name: str) -> RunRow:
    """A row with every field."""
    return RunRow(
        name,
        "p",
        "running",
        "",
        1234,
        5000,
        3.25,
        3.5,
        15_600.0,
        "tokens",
        "fsdp + tp",
        NOW_S,
        NOW_S,
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_tables_fit(width: int) -> None:
    rows = [a_row("one"), a_row("experiments/with-a-very-long-name/of-a-run/seed-20261129")]
    lines = table_lines(rows, width, NOW_S)
    assert max(map(len, lines)) <= max(width, 52)
    assert lines[2].split()[0].startswith("exp")
    assert lines[2].split()[0].endswith("29")
    assert ("sign" in lines[0]) == (width >= 80 + 14) or width == 80


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "runs" / "a", START, END)
    make(tmp_path / "runs" / "deep" / "er" / "b", START, owner=AWAY, age_s=-3600)
    monkeypatch.chdir(tmp_path)
    told = json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)
    assert {(row["name"], row["state"], row["rate"]) for row in told} == {
        ("a", "ended", 200.0),
        ("deep/er/b", "running", 200.0),
    }
    alive = CliRunner().invoke(app, ["runs", "runs", "--alive"]).stdout.splitlines()
    assert [line.split()[0] for line in alive] == ["run", "deep/er/b"]
    one = CliRunner().invoke(app, ["runs", "runs/a"]).stdout
    assert one.splitlines()[1].split()[:2] == ["a", "ended"]
    (tmp_path / "empty").mkdir()
    assert CliRunner().invoke(app, ["runs", "empty"]).stdout == "empty: no runs\n"


def test_no_torch_is_imported(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a", START, END)
    script = (
        "import sys; sys.argv = ['shoal', 'runs']; from shoal.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_lock_table_of_another_form_names_nothing(tmp_path: Path) -> None:
    assert run_table.read_held_locks(tmp_path / "missing") == set()
    (tmp_path / "locks").write_text(
        "1: POSIX ADVISORY WRITE 7 08:01:1 0 EOF\n2: FLOCK\n3: FLOCK ADVISORY WRITE 7 <none>:0 0 EOF\n"
    )
    assert run_table.read_held_locks(tmp_path / "locks") == set()


def test_the_first_start_and_the_last_validation_of_all_sessions_are_shown(tmp_path: Path) -> None:
    first = {**START, "time_s": NOW_S - 90_000}
    held_out = {"event": "validated", "time_s": NOW_S - 80_000, "step": 2, "loss": 4.25}
    again = {**START, "time_s": NOW_S - 60}
    folder = make(tmp_path / "a", first, held_out, {**held_out, "loss": None}, END, again, DIED)
    [row] = list_runs(folder, NOW_S)
    assert (row.state, row.validation, row.started_s) == ("killed", 4.25, NOW_S - 90_000)
    (folder / "events.jsonl").write_bytes(b"\xff\n" + (folder / "events.jsonl").read_bytes())
    [row] = list_runs(folder, NOW_S)
    assert (row.validation, row.started_s) == (4.25, NOW_S - 90_000)


def test_a_loop_of_ones_own_counts_targets(tmp_path: Path) -> None:
    """It has no plan: tokens of a text, or images of a classifier, which were called tokens."""
    (make(tmp_path / "a", START) / "plan.json").unlink()
    [row] = list_runs(tmp_path, NOW_S)
    assert (row.unit, row.rate) == ("targets", 200.0)
    assert " 200 tgt/s " in "\n".join(table_lines([row], None, NOW_S))


def test_a_folder_of_islands_has_the_state_and_the_figures_of_its_islands(tmp_path: Path) -> None:
    """As `shoal islands` leaves it: the folder above has a plan without steps, and no end."""
    parent = make(tmp_path / "run", START, steps=0)
    (parent / "plan.json").write_text(json.dumps({"layout": {"dp_replicate": 1}}))
    held_out = {"event": "validated", "time_s": NOW_S - 3, "step": 3, "loss": 4.25}
    make(parent / "island-0", START, held_out, END)
    make(parent / "island-1", START, END, steps=4)
    row = next(row for row in list_runs(tmp_path, NOW_S) if row.name == "run")
    assert (row.state, row.step, row.steps) == ("ended", 3, 10)
    assert (row.loss, row.validation, row.rate, row.unit) == (1.5, 4.25, 400.0, "tokens")
    rows = [{"step": 5, "loss": loss, "tokens": count} for loss, count in ((4.0, 300), (8.0, 100))]
    for island, last in enumerate(rows):
        append_line(parent / f"island-{island}/metrics.jsonl", last)
    assert read_row(parent, tmp_path, NOW_S, set()).loss == 5.0, "300 tokens of 4.0, 100 of 8.0"
    append_line(parent / "island-1/metrics.jsonl", {"step": 6, "loss": 8.0})
    assert read_row(parent, tmp_path, NOW_S, set()).loss == 6.0, "not all counts are known"
    os.utime(parent / "island-1/metrics.jsonl", (NOW_S - 900, NOW_S - 900))
    assert read_row(parent, tmp_path, NOW_S, set()).loss == 4.0, "an island that is long gone"
    make(parent / "island-2", START, DIED)
    assert states(tmp_path)["run"] == "killed"
