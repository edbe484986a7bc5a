"""A worker's failure in its own words: what is kept of a traceback, and what is written where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.base.errors import CheckpointError, ClusterError, ConfigError, TrainingError, UserError
from shoal.launch import run_worker
from shoal.launch.guardian import collect_leftover_groups
from shoal.launch.worker_failures import read_report


@pytest.fixture
def report_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("SHOAL_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    return tmp_path / "logs" / "rank-3.error.json"


def raising(error: BaseException) -> int:
    raise error


def test_success_writes_nothing(report_path: Path) -> None:
    assert run_worker(lambda: 0) == 0
    assert not report_path.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (CheckpointError("x"), 2), (TrainingError("x"), 3),
     (ClusterError("x"), 1), (ValueError("x"), 1), (SystemExit(0), 1), (SystemExit(5), 1)],
)  # fmt: skip
def test_exit_codes(report_path: Path, error: BaseException, code: int) -> None:
    assert run_worker(lambda: raising(error)) == code
    written = json.loads(report_path.read_text())
    assert written["exit_code"] == code
    assert written["kind"] == type(error).__name__


@pytest.mark.parametrize(
    ("error", "certain"),
    [(ValueError("odd"), True), (TypeError("build() got width"), True), (KeyError(3), True),
     (OSError(5, "Input/output error"), False), (RuntimeError("CUDA error: busy"), False),
     (MemoryError(), False), (RuntimeError("Connection refused"), False)],
)  # fmt: skip
def test_what_may_pass_is_not_certain_to_fail_again(
    report_path: Path, error: Exception, certain: bool
) -> None:
    run_worker(lambda: raising(error))
    report = read_report(report_path)
    assert report is not None
    assert report.certain == certain


def test_a_named_mistake_is_one_line_and_another_a_traceback(
    report_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_worker(lambda: raising(ConfigError("train.steps = 0: must be above 0")))
    report = read_report(report_path)
    assert report is not None
    assert not report.traceback
    assert report.line == "train.steps = 0: must be above 0"
    assert capsys.readouterr().err == "train.steps = 0: must be above 0\n"
    run_worker(lambda: raising(ValueError("odd")))
    report = read_report(report_path)
    assert report is not None
    place, _, line = report.line.partition(": ")
    assert (Path(place.partition(":")[0]).name, line) == ("test_worker.py", "ValueError: odd")
    assert report.certain
    assert report.traceback.startswith("Traceback (most recent call last):")
    assert "launch/worker_errors.py" not in report.traceback
    assert report.traceback in capsys.readouterr().err
    assert list(report_path.parent.iterdir()) == [report_path]  # no draft is left


def test_notes_reach_the_log_and_the_report(
    report_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = UserError("data.source: sample 3: ValueError: odd")
    failure.add_note("\n".join(f"line {number} of theirs" for number in range(40)) + "\n")
    run_worker(lambda: raising(failure))
    report = read_report(report_path)
    assert report is not None
    assert report.line == "data.source: sample 3: ValueError: odd"
    shown = report.traceback.splitlines()
    assert shown[0] == "(16 lines above are in the log)"
    assert shown[-2:] == ["line 39 of theirs", report.line]
    log = capsys.readouterr().err.splitlines()
    assert log[0] == "line 0 of theirs", "the log has all of it"
    assert len(log) == 41


def test_lost_peers_are_marked(report_path: Path) -> None:
    for error, lost in [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), True),
        (ClusterError("the processes did not meet"), True),
        (RuntimeError("shape mismatch"), False),
    ]:
        run_worker(lambda error=error: raising(error))
        report = read_report(report_path)
        assert report is not None
        assert report.lost_peer is lost


def test_a_long_traceback_keeps_its_end_and_its_causes(report_path: Path) -> None:
    def deep(n: int) -> None:
        if n:
            other(n - 1)
        raise KeyError("bottom")

    def other(n: int) -> None:
        deep(n)

    def main() -> int:
        try:
            deep(20)
        except KeyError as cause:
            raise ValueError("top") from cause
        return 0

    run_worker(main)
    report = read_report(report_path)
    assert report is not None
    lines = report.traceback.splitlines()
    assert len(lines) == 26
    assert lines[0].endswith("lines above are in the log)")
    assert lines[-1] == "ValueError: top"
    assert "KeyError: 'bottom'" in report.traceback


def test_a_report_that_cannot_be_written_still_gives_the_code(
    report_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_path.parent.rmdir()
    assert run_worker(lambda: raising(ValueError("odd"))) == 1
    assert "ValueError: odd" in capsys.readouterr().err


def test_a_damaged_report_is_no_report(tmp_path: Path) -> None:
    for text in ("{half", "[]", '{"kind": "x"}'):
        (tmp_path / "r.json").write_text(text)
        assert read_report(tmp_path / "r.json") is None


def test_guardian_forgets_what_is_gone() -> None:
    assert collect_leftover_groups(["+5\n", "+6\n", "-5\n"]) == {6}


@pytest.mark.parametrize("supervised", [False, True])
def test_who_has_no_supervisor_writes_the_death_down(
    report_path: Path, monkeypatch: pytest.MonkeyPatch, *, supervised: bool
) -> None:
    """Under torchrun; a peer's fault the peer tells itself."""
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    if supervised:
        monkeypatch.setenv("SHOAL_STORE", "/nowhere")
    for error in (ValueError("mine"), RuntimeError("Connection closed by peer")):
        assert run_worker(lambda error=error: raising(error)) == 1
    log = report_path.parents[1] / "events.jsonl"
    told = [json.loads(line) for line in log.open()] if log.exists() else []
    assert [(one["event"], one["rank"]) for one in told] == [("worker_died", 3)] * (not supervised)
    assert all(one["traceback"].endswith("ValueError: mine") for one in told)
