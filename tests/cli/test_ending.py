"""How `shoal train` ends: what the exit status claims is held against what lies on disk."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.events import EventLog, append_line
from shoal.cli import start
from shoal.cli.ending import SessionEnding, shell_command
from shoal.launch import RunOutcome

STOPPED = RunOutcome("stopped", 143, 1, "stopped by SIGTERM")
LATE = RunOutcome("stopped", 143, 1, "stopped by SIGTERM; killed rank 1, still busy after 60 s")


def left(folder: Path, *, made: int = 0, saved: int = 0, began: bool = True) -> SessionEnding:
    """The ending of a run that made some steps and saved a checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    log = EventLog(folder / "events.jsonl", None)
    log.emit("run_started")
    if began:
        log.emit("compute_started")
    for step in range(1, made + 1):
        append_line(folder / "metrics.jsonl", {"step": step, "loss": 1.0})
    if saved:
        (folder / "checkpoints" / f"step-{saved}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{saved}" / "manifest.json").touch()
    return SessionEnding.of(folder)


@pytest.mark.parametrize(
    ("outcome", "state", "status", "trouble"),
    [
        (STOPPED, {"made": 8, "saved": 8}, 143, ""),
        (STOPPED, {"made": 8, "saved": 5}, 1,
         "stopped by SIGTERM; the newest checkpoint is step-5: steps 6 – 8 are lost"),
        (LATE, {"made": 8, "saved": 7}, 1, "stopped by SIGTERM; killed rank 1, still busy after "
                                           "60 s; the newest checkpoint is step-7: step 8 is lost"),
        (STOPPED, {"made": 8}, 1, "stopped by SIGTERM; nothing was saved: steps 1 – 8 are lost"),
        (STOPPED, {}, 1, ""),
        (STOPPED, {"made": 8, "saved": 5, "began": False}, 143, ""),
        (RunOutcome("unsaved", 1, 1, "the last checkpoint could not be written"), {"made": 4}, 1,
         "the last checkpoint could not be written: there is none, so steps 1 – 4 are lost"),
        (RunOutcome("unsaved", 1, 1, "the last checkpoint could not be written"),
         {"made": 4, "saved": 3}, 1,
         "the last checkpoint could not be written: the newest is step-3, so step 4 is lost"),
        (RunOutcome("failed", 3, 1, "it diverged"), {"made": 4, "saved": 3}, 3, "it diverged"),
        (RunOutcome("finished", 0, 1, ""), {"made": 4, "saved": 4}, 0, ""),
    ],
)  # fmt: skip
def test_a_status_claims_what_is_on_disk(
    tmp_path: Path, outcome: RunOutcome, state: dict[str, Any], status: int, trouble: str
) -> None:
    ending = left(tmp_path / "run", **state)
    assert (ending.status(outcome), ending.error_line(outcome)) == (status, trouble)


def test_the_reason_of_the_save_that_failed_is_said(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", None)
    left(tmp_path, made=4)
    log.emit("checkpoint_failed", step=4, reason="No space left on device")
    outcome = RunOutcome("unsaved", 1, 1, "the last checkpoint could not be written")
    assert SessionEnding.of(tmp_path).error_line(outcome) == (
        "the last checkpoint could not be written (No space left on device): there is none, so "
        "steps 1 – 4 are lost"
    )


def test_a_restarted_attempt_that_never_began_lost_nothing_more(tmp_path: Path) -> None:
    left(tmp_path, made=8, saved=5)
    EventLog(tmp_path / "events.jsonl", None).emit("restarting", attempt=1, of=3, saved=5)
    assert SessionEnding.of(tmp_path).status(STOPPED) == 143, "what it goes on from is saved"


def test_next_lines_can_be_pasted_and_hold_no_advice_that_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "ünï côde ✓"
    done = left(folder, made=4, saved=4).next_command_lines(RunOutcome("finished", 0, 1, ""))
    line = done.splitlines()[1].removeprefix("next: ")
    expected = ["shoal", "checkpoint", "export", str(folder), "ünï côde ✓-exported"]
    assert shlex.split(line) == expected
    longer = shlex.split(done.splitlines()[2].removeprefix("or train longer: "))
    assert longer == ["shoal", "train", "--resume", str(folder), "train.steps=N"]
    early = left(tmp_path / "early").next_command_lines(STOPPED)
    assert early.endswith(f"next: to begin again: shoal train {tmp_path / 'early' / 'run.toml'}")
    assert (
        left(tmp_path / "f")
        .next_command_lines(RunOutcome("failed", 1, 1, "x"))
        .endswith("start a new run")
    )
    full = left(tmp_path / "full", made=4).next_command_lines(RunOutcome("unsaved", 1, 1, "x"))
    assert "export" not in full
    assert "next: mend that, then: shoal train " in full
    resumed = left(tmp_path / "held", made=4, saved=3).next_command_lines(LATE)
    assert resumed.endswith(f"next: shoal train --resume {tmp_path / 'held'}")


def test_a_narrow_terminal_breaks_a_command_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["shoal", "checkpoint", "export", "runs/llama-stdlib-20261122", "model.safetensors"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    text = shell_command(*words)
    assert max(map(len, text.splitlines())) <= 60 - len("next: ")
    assert text.count(" \\\n") == 1
    assert shlex.split(text.replace("\\\n", "")) == words


@pytest.mark.parametrize("began", [False, True])
def test_an_override_that_failed_before_the_first_step_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, began: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = start.prepare_run(["model.name=mlp", "data.source=digits", "run.name=x"], None)
    left(fresh.folder, made=3, saved=3)
    start.write_run_folder(fresh)
    kept = (fresh.folder / "run.toml").read_text()
    resumed = start.prepare_run(["optimizer.lr=0.5"], fresh.folder)

    def supervise(*_: Any, emit: Any, **__: Any) -> RunOutcome:
        if began:
            emit("compute_started")
        return RunOutcome("failed", 2, 1, "model.x: only in this model")

    monkeypatch.setattr(start, "supervise", supervise)
    assert start.launch_run(resumed, {}) == 2
    assert ((fresh.folder / "run.toml").read_text() == kept) != began


@pytest.mark.parametrize("busy", [False, True])
def test_a_stop_before_the_first_step_leaves_no_empty_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    busy: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = start.prepare_run(["model.name=mlp", "data.source=digits", "run.name=x"], None)
    folder = Path("runs/x")

    def supervise(*_: Any, **__: Any) -> RunOutcome:
        (folder / "logs").mkdir()
        (folder / "logs" / "rank-0.log").write_text("--- header\n" + "words\n" * 100 * busy)
        return RunOutcome("stopped", 130, 1, "stopped by Ctrl-C")

    monkeypatch.setattr(start, "supervise", supervise)
    assert start.launch_run(prepared, {}) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert folder.exists() == busy, "what a worker said is kept"
    last = out.splitlines()[-1]
    if busy:
        assert last == "next: to begin again: shoal train runs/x/run.toml"
    else:
        assert last == "stopped before the first step: nothing to save, and no run folder is left"
