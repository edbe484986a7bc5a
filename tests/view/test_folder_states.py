"""Made run folders of every kind: `shoal runs` and `shoal diagnose` agree on each."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.base.runlog.events import append_line
from shoal.checkpoint.format.lease import Owner, RunLease
from shoal.cli.main import app
from shoal.view.diagnose import diagnose, findings_text, read_continuation
from shoal.view.diagnosis.folder_state import WRONG, FolderState, read_folder_state
from shoal.view.progress import RunProgress
from shoal.view.run_table import list_runs, table_lines, worst_line

NOW_S = time.time()
START = {"event": "run_started", "time_s": NOW_S - 50}
COMPUTE = {"event": "compute_started", "time_s": NOW_S - 45}
END = {"event": "run_finished", "time_s": NOW_S - 2, "how": "completed"}
HANG = {"event": "hang", "time_s": NOW_S - 9, "step": 3, "rank": 1, "waited_s": 60.0}
STOP = {"event": "stop_requested", "time_s": NOW_S - 5, "signal": "SIGTERM", "steps": True}
PEAKS = {"event": "memory_peaks", "time_s": NOW_S - 2}
SAVED = {"event": "checkpoint_saved", "time_s": NOW_S - 4, "step": 3, "folder": "step-3"}
UNLIKE = {"event": "collectives_differ", "time_s": NOW_S - 4, "step": 3, "text": "ranks differ"}
AGAIN = {"event": "restarting", "time_s": NOW_S - 20, "attempt": 1, "of": 3, "saved": None}
AWAY = Owner("x", 1, "elsewhere", NOW_S, "another boot", 5)
GONE = replace(Owner.this_process("x"), pid=2**22 + 1, born=12345)
ELASTIC = {"message": {"message": "ValueError: no", "extraInfo": {"timestamp": str(int(NOW_S))}}}


def died(how: str, trace: str = "", **fields: Any) -> dict[str, Any]:
    """A rank's death, after which nothing came."""
    event = {"event": "worker_died", "time_s": NOW_S - 3, "rank": 1, "pid": 7, "fatal": True}
    return {**event, "how": how, "traceback": trace, **fields}


def report(line: str, code: int = 1, *, age_s: float = 3.0, lost_peer: bool = False) -> str:
    """A rank's error report, as Shoal's workers write it."""
    told = {"kind": "ValueError", "line": line, "traceback": "", "exit_code": code}
    return json.dumps({**told, "time_s": NOW_S - age_s, "lost_peer": lost_peer, "certain": True})


def ranks(*hosts: str, age_s: float = 48.0) -> str:
    """Content of ranks.json."""
    listed = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    return json.dumps({"time_s": NOW_S - age_s, "ranks": listed})


def make(
    folder: Path,
    *events: dict[str, Any],
    steps: int = 3,
    of: int = 10,
    script: bool = False,
    owner: Owner | None = None,
    age_s: float = 1.0,
    files: dict[str, str | bytes] | None = None,
) -> Path:
    """A run folder as a run leaves it, its files as old as said."""
    folder.mkdir(parents=True)
    if not script:
        (folder / "run.toml").write_text("[train]\n")
        (folder / "plan.json").write_text(json.dumps({"steps": of}))
    for event in events:
        append_line(folder / "events.jsonl", {"step": None, **event})
    for step in range(steps):
        append_line(folder / "metrics.jsonl", {"step": step + 1, "loss": 1.0, "step_s": 0.5})
    (folder / "owner.lock").touch()
    if owner is not None:
        (folder / "owner.json").write_text(json.dumps(asdict(owner)))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for path in (folder, *folder.iterdir()):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return folder


TORN = b'{"event": \xff\x00 "step": [1\n{"step": "x"}\n'
KEY_ERROR = "Traceback …\nKeyError: 'gate'"
LEFT = "exit code 0"
UNSAVED = {**END, "how": "completed; the last checkpoint could not be written"}
ON_REQUEST = {**END, "how": "stopped on request"}
UNSTOPPED = {**END, "how": "stopped on request; the last save failed"}
BESIDE = "logs/rank-1.error.json"
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str, str]] = {
    # events, the rest, the state, a part of what `diagnose` finds ("" nothing that lasts)
    "completed": ([START, COMPUTE, END], {"steps": 10}, "ended", ""),
    "stopped": ([START, STOP, SAVED, ON_REQUEST], {}, "stopped", ""),
    "unsaved": ([START, UNSAVED], {"steps": 10}, "unsaved", "could not be written"),
    "unsaved-stop": ([START, STOP, UNSTOPPED], {}, "unsaved", "save failed"),
    "cut-stop": ([START, STOP], {}, "unsaved", "no checkpoint was written after it"),
    "refused": ([START, died("exit code 2", "model.dim = 3")], {"steps": 0}, "refused", "model.dim"),
    "corrected-late": ([START, died("exit code 2", "disk full")], {}, "failed", "disk full"),
    "exception": ([START, COMPUTE, died("exit code 1", KEY_ERROR)], {}, "failed", "KeyError"),
    "left": ([START, died(LEFT, "something in it calls os._exit(0)")], {}, "failed", "os._exit"),
    "diverged": ([START, died("exit code 3", "all were skipped")], {}, "diverged", "skipped"),
    "sigkill": ([START, died("killed by SIGKILL")], {}, "killed", "SIGKILL"),
    "segfault": ([START, died("killed by SIGSEGV")], {}, "killed", "SIGSEGV"),
    "watchdog-killed": ([START, HANG, died("ended by the watch")], {}, "hung", "no rank goes on"),
    "unlike": ([START, UNLIKE], {}, "failed", "ranks differ"),
    "unlike-and-gone": ([START, UNLIKE], {"owner": GONE}, "failed", "ranks differ"),
    "agent-killed": ([START, COMPUTE], {"owner": GONE}, "killed", "without a word"),
    "abandoned": ([START, COMPUTE], {"steps": 250, "of": 3000}, "abandoned", "step 250 of 3000"),
    "elsewhere": ([START], {"owner": AWAY, "age_s": 90_000}, "abandoned", "25 h"),
    "elsewhere-silent": ([START], {"owner": AWAY, "age_s": 4000}, "silent", "nothing was written"),
    "elsewhere-over": ([START, died("exit code 1", "E")], {"owner": AWAY}, "failed", "E"),
    "copied": ([START], {"owner": Owner.this_process("x")}, "abandoned", ""),
    "error-json": ([START], {"files": {BESIDE: report("ValueError: a")}}, "failed", "ValueError: a"),
    "error-json-of-a-script": (
        [], {"script": True, "files": {BESIDE: report("KeyError: b")}}, "failed", "KeyError: b",
    ),
    "error-json-and-gone": (
        [START], {"owner": GONE, "files": {BESIDE: report("KeyError: b")}}, "failed", "KeyError: b",
    ),
    "error-json-refused": (
        [START], {"steps": 0, "files": {BESIDE: report("x = 3", 2)}}, "refused", "x = 3",
    ),
    "error-json-lost-peer": (
        [START],
        {"files": {BESIDE: report("closed by peer", lost_peer=True), "logs/rank-0.error.json": report("E: c", age_s=1)}},
        "failed", "E: c",
    ),
    "error-json-older": (
        [START, COMPUTE], {"files": {BESIDE: report("old", age_s=90)}, "of": 9}, "abandoned", "step 3 of 9",
    ),
    "error-json-after-an-end": ([START, END], {"files": {BESIDE: report("E")}}, "ended", ""),
    "torchrun-error": (
        [], {"script": True, "files": {"attempt_0/1/error.json": json.dumps(ELASTIC)}}, "failed", "rank 1: exit code 1: ValueError: no",
    ),
    "own-loop": ([PEAKS], {"script": True, "files": {"ranks.json": ranks("a")}}, "ended", ""),
    "own-loop-unclosed": ([], {"script": True, "files": {"ranks.json": ranks("a")}}, "stopped", ""),
    "own-loop-no-steps": ([PEAKS], {"script": True, "steps": 0}, "ended", ""),
    "own-loop-raised": (
        [died("exit code 1", KEY_ERROR, fatal=None)], {"script": True}, "failed", "KeyError",
    ),
    "own-loop-went-on": (
        [died("exit code 1", KEY_ERROR, fatal=None), PEAKS],
        {"script": True, "files": {"ranks.json": ranks("a", age_s=2.5)}}, "ended", "",
    ),
    "other-machine-died": (
        [], {"script": True, "files": {"ranks.json": ranks("a", "b")}}, "abandoned", "was on a, b",
    ),
    "other-machine-fine": (
        [PEAKS], {"script": True, "files": {"ranks.json": ranks("a", "b")}}, "ended", "",
    ),
    "restarted": ([START, COMPUTE, {**died("killed by SIGKILL"), "fatal": False}, AGAIN, COMPUTE, END], {"steps": 10}, "ended", ""),
    "restarting-gone": (
        [START, COMPUTE, {**died("killed by SIGKILL"), "fatal": False}, AGAIN], {"owner": GONE}, "killed", "SIGKILL",
    ),
    "torn-events": ([], {"files": {"events.jsonl": TORN}}, "damaged", "events.jsonl: no line"),
    "empty-events": ([], {"files": {"events.jsonl": b""}}, "damaged", "events.jsonl"),
    "half-a-line": ([], {"steps": 0, "files": {"events.jsonl": b'{"event": "run_st'}}, "damaged", "events.jsonl"),
    "no-events": ([], {}, "damaged", "events.jsonl"),
    "events-are-a-folder": ([], {"files": {"events.jsonl/x": ""}}, "damaged", "is no file"),
    "torn-metrics": ([START, END], {"steps": 0, "files": {"metrics.jsonl": TORN}}, "ended", "metrics.jsonl"),
    "never-ran": ([], {"steps": 0}, "unstarted", "no run ever started"),
    "more-steps-than-planned": ([START, END], {"steps": 22, "of": 20}, "ended", ""),
}  # fmt: skip


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Path]]:
    """Hold the lock of a folder, as its run does."""
    files = []

    def lock(folder: Path) -> Path:
        files.append((folder / "owner.lock").open("a"))
        fcntl.flock(files[-1], fcntl.LOCK_EX)
        return folder

    yield lock
    for file in files:
        file.close()


def found(folder: Path) -> list[str]:
    """The findings about faults that last."""
    return [f"{one.what}; {one.why}" for one in diagnose(folder) if not one.advice and not one.over]


@pytest.mark.parametrize("name", CASES)
def test_both_commands_agree_on_a_folder(tmp_path: Path, name: str) -> None:
    events, rest, word, part = CASES[name]
    folder = make(tmp_path / name, *events, **rest)
    state = read_folder_state(folder, NOW_S)
    [row] = list_runs(folder, NOW_S)
    assert (state.word, row.state) == (word, word)
    assert any(part in line for line in found(folder)) if part else found(folder) == []
    assert not state.alive or word == "silent"
    assert part or word not in set(WRONG) - {"abandoned"}, "a wrong state without a finding"


def test_the_lock_counts_before_everything_else(
    tmp_path: Path, hold: Callable[[Path], Path]
) -> None:
    here = Owner.this_process("x")
    hold(make(tmp_path / "behind", START, owner=here, age_s=3600))
    hold(make(tmp_path / "silent", {**START, "time_s": NOW_S - 3650}, owner=here, age_s=3600))
    hold(make(tmp_path / "torn", owner=here, files={"events.jsonl": TORN}))
    hold(
        make(
            tmp_path / "hung-before",
            HANG,
            owner=here,
            script=True,
            files={"ranks.json": ranks("a", age_s=2)},
        )
    )
    states = {row.name: (row.state, row.alive) for row in list_runs(tmp_path, NOW_S)}
    assert states == {
        "behind": ("running", True),
        "silent": ("silent", True),
        "torn": ("running", True),
        "hung-before": ("running", True),
    }


def test_ranks_that_start_again_are_starting(tmp_path: Path, hold: Callable[[Path], Path]) -> None:
    """Their metrics still have the steps of the attempt before."""
    here, resumed = Owner.this_process("x"), {"event": "resumed", "step": 2}
    dead = [START, COMPUTE, {**died("killed by SIGKILL"), "fatal": False}, AGAIN]
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
        "again": (dead, {}, "starting"),
        "restored": ([*dead, {**resumed, "step": 3}], {}, "starting"),
        "steps": ([*dead, resumed, COMPUTE], {}, "running"),
        "loop": ([START, AGAIN], {"script": True}, "starting"),
        "loop-met": (
            [START, AGAIN], {"script": True, "files": {"ranks.json": ranks("a", age_s=9)}}, "running",
        ),
    }  # fmt: skip
    for name, (events, rest, _) in cases.items():
        hold(make(tmp_path / name, *events, owner=here, **rest))
    states = {row.name: row.state for row in list_runs(tmp_path, NOW_S)}
    assert states == {name: word for name, (_, _, word) in cases.items()}


def test_a_run_of_islands_is_as_its_worst_island(tmp_path: Path) -> None:
    parent = make(tmp_path / "run", START, steps=0)
    make(parent / "island-0", START, END, steps=10)
    make(parent / "island-1", START, died("killed by SIGKILL"), steps=4)
    state = read_folder_state(parent, NOW_S)
    assert (state.word, state.step, state.steps) == ("killed", 4, 10)
    assert state.how.startswith("island-1: rank 1")
    told = CliRunner().invoke(app, ["diagnose", str(parent)])
    assert (told.exit_code, "no end is recorded" in told.output) == (1, False)
    make(tmp_path / "good" / "island-0", START, END, steps=10)
    make(tmp_path / "good-run", START, steps=0)
    (tmp_path / "good" / "island-0").rename(tmp_path / "good-run" / "island-0")
    assert read_folder_state(tmp_path / "good-run", NOW_S).word == "ended"


def test_a_pipe_and_special_files_are_not_opened(tmp_path: Path) -> None:
    folder = make(tmp_path / "odd", START, steps=0)
    for name in ("metrics.jsonl", "plan.json", "owner.json", "ranks.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "logs").mkdir()
    os.mkfifo(folder / "logs" / "rank-0.error.json")
    assert isinstance(read_folder_state(folder, NOW_S), FolderState)
    assert any("metrics.jsonl: is no file" in line for line in found(folder))


def test_texts_of_a_folder_are_stripped(tmp_path: Path) -> None:
    evil = "\x1b]0;x\x07\x1b[31m<script>"
    folder = make(
        tmp_path / "a", START, died("exit code 1", evil), files={"ranks.json": ranks(evil, "b")}
    )
    [row] = list_runs(folder, NOW_S)
    assert "\x1b" not in row.how + "".join(table_lines([row], None, NOW_S)) + worst_line([row])
    assert "\x1b" not in findings_text(folder, diagnose(folder))
    clean = make(tmp_path / f"b{evil}".replace("/", ""), START, END)
    assert "\x1b" not in findings_text(clean, diagnose(clean))


def test_made_folders_beside_runs_are_listed_as_unstarted(tmp_path: Path) -> None:
    make(tmp_path / "a", START, END)
    (tmp_path / "made").mkdir()
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "run.toml").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").touch()
    rows = {row.name: row.state for row in list_runs(tmp_path, NOW_S)}
    assert rows == {"a": "ended", "made": "unstarted", "ready": "unstarted"}
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path / "ready")])
    assert (told.exit_code, "no run ever started there" in told.output) == (1, True)


def test_what_a_crash_in_parallelize_leaves_is_diagnosed_as_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal runs` names it as the next one to diagnose, and diagnose said that it is no run."""
    (tmp_path / "runs" / "crashed" / "logs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("crashed", "runs/crashed"):
        told = CliRunner().invoke(app, ["diagnose", name])
        assert told.exit_code == 1, told.exception
        assert "no run ever started there" in told.output
        assert "a script that ends in shoal.parallelize prints the reason" in told.output
        assert "shoal train" not in told.output


def test_the_last_line_names_the_worst(tmp_path: Path) -> None:
    make(tmp_path / "refused", START, died("exit code 2"), steps=0)
    make(tmp_path / "my failed", START, died("exit code 1"))
    make(tmp_path / "ended", START, END)
    told = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout.splitlines()
    assert (
        told[-1] == f"next: shoal diagnose '{tmp_path}/my failed'  (failed; also refused refused)"
    )
    assert "started" in told[0], "a pipe gets all columns"
    rows = [row for row in list_runs(tmp_path) if row.name == "ended"]
    assert worst_line(rows) == ""


WEIRD: dict[str, dict[str, str | bytes]] = {
    "fields": {
        "events.jsonl": '{"event":"worker_died","how":{"a":1},"traceback":[1],"rank":{},"fatal":"y"}\n'
        '{"event":"stop_requested","signal":{"a":[1]},"step":"x"}\n'
        '{"event":"resumed","step":{}}\n{"event":"hang","step":[1],"rank":null}\n'
    },
    "times": {
        "events.jsonl": '{"event":"run_started","time_s":1e300}\n{"event":"notice","time_s":-1}\n'
    },
    "owner": {"owner.json": json.dumps({**asdict(GONE), "started_s": 1e18})},
    "owner-types": {"owner.json": json.dumps({**asdict(GONE), "host": [1], "boot": {}})},
    "plan": {"plan.json": '{"steps":1e400,"layout":[1],"unit":{}}'},
    "ranks": {"ranks.json": '{"time_s":"x","ranks":[1,{"host":{}},null]}'},
    "reports": {
        "logs/rank-x.error.json": '{"line":1,"traceback":"t","exit_code":"9","time_s":"x"}',
        "a/error.json": '{"message":{"message":{"x":1},"extraInfo":[1]}}',
        "b/error.json": '{"message":{"extraInfo":{"py_callstack":7,"timestamp":"99999999999999"}}}',
    },
    "deep": {"events.jsonl": "[" * 100_000 + '\n{"event":"run_started"}\n'},
    "restarts": {
        "events.jsonl": '{"event":"restarting","of":{"\\u001b[31m":1}}\n'
        '{"event":"worker_died","how":"exit code 2\\u001b[31m","fatal":true}\n',
        "run.toml": "x = " + "[" * 10_000,
    },
    "no-launch": {
        "events.jsonl": '{"event":"worker_died","how":[1],"fatal":true}\n',
        "run.toml": "launch = [1]",
    },
    "numbers": {"metrics.jsonl": '{"step":1e308}\n{"step":1,"loss":NaN,"step_s":Infinity}\n'},
}


def test_more_steps_than_planned_are_no_share(tmp_path: Path) -> None:
    rows = list_runs(make(tmp_path / "a", START, END, steps=22, of=20), NOW_S)
    assert "22/20" in table_lines(rows, None, NOW_S)[1]
    progress = RunProgress(20)
    progress.add([{"step": 22, "loss": 1.0, "step_s": 0.1}], cut_back=False)
    assert progress.key_values().startswith("step=22/20 loss=")
    assert progress.fraction is None
    assert progress.left_s() is None


@pytest.mark.parametrize("name", WEIRD)
def test_values_of_wrong_types_are_no_traceback(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / name, START, files=WEIRD[name])
    rows = list_runs(folder, NOW_S)
    assert table_lines(rows, 80, NOW_S)
    assert all(json.dumps(one.record()) for one in diagnose(folder))
    assert rows[0].state == read_folder_state(folder, NOW_S).word
    onward = read_continuation(folder)
    assert onward is None or "\x1b" not in "".join(onward.lines())
    assert json.dumps(onward and onward.record())


def test_only_a_run_that_ended_before_it_was_done_has_a_way_on(
    tmp_path: Path, hold: Callable[[Path], Path]
) -> None:
    for name in CASES:
        events, rest, word, _ = CASES[name]
        onward = read_continuation(make(tmp_path / name, *events, **rest))
        done = ("ended", "refused", "damaged", "unstarted", "silent")
        closed = ("own-loop", "own-loop-no-steps", "own-loop-went-on", "other-machine-fine")
        assert (onward is None) == (word in done or name in closed), name
    held = make(tmp_path / "held", START, HANG, owner=Owner.this_process("x"))
    assert read_continuation(hold(held)) is None, "its processes are there"


def test_a_command_for_a_run_that_goes_on_waits_for_its_stop(
    tmp_path: Path, hold: Callable[[Path], Path]
) -> None:
    slow = {"event": "slow_rank", "rank": 1, "host": "a", "phase": "data"}
    slow = {**slow, "step": 2, "extra_s": 0.1, "share": 0.3, "time_s": NOW_S - 9}
    folder = make(
        tmp_path / "live", START, slow, owner=Owner.this_process("x"),
        files={"checkpoints/step-2/manifest.json": "{}"},
    )  # fmt: skip
    # A late test finds the folder silent too.
    [found] = [one for one in diagnose(hold(folder)) if one.kind == "slow_rank"]
    assert found.command == f"once it has stopped: shoal train --resume {folder} data.workers=2"


def test_a_loop_that_has_written_no_line_yet_is_starting(tmp_path: Path) -> None:
    """Its first step may compile for minutes; until then only its lease and its plan are there."""
    with RunLease(tmp_path / "run", "run"):
        (tmp_path / "run" / "plan.json").write_text("{}")
        assert read_folder_state(tmp_path / "run").word == "starting"
