"""The supervisor with tiny workers: restarts, the culprit's own words, clean stops, exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from proof_rows import chosen
from shoal.base.errors import BugError, ClusterError
from shoal.base.runlog.events import EventLog
from shoal.launch import RunOutcome, State, stop_grace, supervise
from shoal.launch.supervisor import TICK_EVERY_S, _Supervisor

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
from shoal.base import errors
from shoal.launch import run_worker
rank, attempt = int(os.environ["RANK"]), int(os.environ["SHOAL_ATTEMPT"])
folder = Path(os.environ["SHOAL_RUN_FOLDER"])
def step(n):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": n}) + "\\n")
"""


class Run:
    """Supervises one script, whose workers are programs or forked; keeps the events."""

    def __init__(self, folder: Path, imports: tuple[str, ...] = ()) -> None:
        self.folder, self.imports = folder, imports
        self.events: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time_s": time.time(), **fields})

    def named(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    def __call__(self, body: str, *, processes: int = 2, **settings: Any) -> RunOutcome:
        script = self.folder / "worker_script.py"
        script.write_text(PRELUDE + body)
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return supervise(
            [sys.executable, "-m", script.stem],
            processes=processes,
            folder=self.folder,
            restarts=settings.pop("restarts", 3),
            emit=self.emit,
            environ={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            imports=self.imports,
            **settings,
        )

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()


KINDS = {"programs": (), "forked": ("json",)}
BOTH = pytest.mark.parametrize("run", KINDS.values(), ids=KINDS, indirect=True)
"""Where how a worker is started may matter: words and logs, restarts, signals."""


@pytest.fixture(
    params=[pytest.param((), marks=pytest.mark.proof), ("json",)], ids=["programs", "forked"]
)
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    return Run(tmp_path, request.param)


def after(run: Run, seconds: float, act: Callable[[], None], mark: str = "up-0") -> None:
    """Do something `seconds` after a worker has written the file `mark`, "up-1" after both have."""

    def wait() -> None:
        deadline_s = time.monotonic() + 10
        marks = [run.folder / one for one in (("up-0", mark) if mark == "up-1" else (mark,))]
        while not all(one.exists() for one in marks) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(seconds)
        act()

    threading.Thread(target=wait, daemon=True).start()


def to_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


UP = "(folder / f'up-{rank}').touch()\n"


@pytest.mark.parametrize("hangs", [False, True])
def test_devices_are_recorded_and_a_hanging_program_holds_nothing_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """By the supervisor; what it started ends with it."""
    program, pid = run.folder / "nvidia-smi", run.folder / "pid"
    then = "exec sleep 600" if hangs else "echo '0, NVIDIA H200, 83, 1024, 143771, 612.3, 61'"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}\n{then}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{run.folder}{os.pathsep}{os.environ['PATH']}")
    path = pid if hangs else run.folder / "devices.jsonl"
    outcome = run(f"while not Path({str(path)!r}).exists(): time.sleep(0.01)", processes=1)
    assert outcome == RunOutcome("finished", 0, 1, "")
    assert (run.folder / "devices.jsonl").exists() != hangs
    if hangs:
        child = int(pid.read_text())
        until_s = time.monotonic() + 10
        while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
            assert time.monotonic() < until_s
            time.sleep(0.01)
    else:
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["devices"][0]["power_w"] == 612.3


@BOTH
def test_all_workers_finish_and_their_words_are_in_their_logs(run: Run) -> None:
    outcome = run("print('hello from', rank)\nprint('to stderr', file=sys.stderr)")
    assert outcome == RunOutcome("finished", 0, 1, "")
    assert "hello from 1\nto stderr" in run.log(1)
    assert "rank 1 of 2 · attempt 0 ---" in run.log(1)
    started = run.named("worker_started")
    assert [(e["rank"], e["attempt"]) for e in started] == [(0, 0), (1, 0)]
    assert len({e["pid"] for e in started}) == 2


def test_a_mistake_of_the_user_is_one_line_that_says_where_there_is_more(run: Run) -> None:
    body = """
def main():
    failure = errors.UserError("data.source: sample 3: ValueError: odd")
    if rank == 1:
        failure.add_note("their own traceback")
        raise failure
    time.sleep(30)
sys.exit(run_worker(main))
"""
    outcome = run(body)
    assert (outcome.exit_code, outcome.attempts) == (2, 1)
    log_path = run.folder / "logs" / "rank-1.log"
    assert outcome.message == f"data.source: sample 3: ValueError: odd; more in {log_path}"
    assert "their own traceback" in run.log(1)
    (died,) = run.named("worker_died")
    assert died["traceback"].startswith("their own traceback\n")


@BOTH
def test_a_killed_worker_is_named_and_all_start_again(run: Run) -> None:
    body = """
step(attempt)
if attempt == 0:
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
"""
    outcome = run(body)
    assert outcome == RunOutcome("finished", 0, 2, "")
    (died,) = run.named("worker_died")
    pids = {e["rank"]: e["pid"] for e in run.named("worker_started") if e["attempt"] == 0}
    assert (died["rank"], died["how"], died["pid"]) == (1, "killed by SIGKILL", pids[1])
    assert not died["fatal"]
    assert [(e["attempt"], e["of"]) for e in run.named("restarting")] == [(1, 3)]
    assert "attempt 1" in run.log(0)


KILLED = """
killed = range({killed})
if rank in killed and attempt == 0:
    time.sleep(0.1 * rank)
    (folder / f"gone-{{rank}}-of-{killed}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not all((folder / f"gone-{{one}}-of-{killed}").exists() for one in killed):
    time.sleep(0.005)
time.sleep(1.0 if attempt or len(killed) < 2 else 60)  # the deaths are seen before the end
step(1)
"""


def test_spare_ranks_that_are_killed_are_left_out_as_long_as_one_lives(run: Run) -> None:
    """Of two, one: the others come to their end. Both: all start again."""
    outcome = run(KILLED.format(killed=1), processes=3, spare=(0, 1))
    assert (outcome.status, outcome.attempts) == ("finished", 1)
    assert not run.named("worker_died")
    (told,) = run.named("notice")
    assert told["text"] == "rank 0 was killed by SIGKILL, and the others go on without it"
    run.events.clear()
    outcome = run(KILLED.format(killed=2), processes=3, spare=(0, 1))
    assert (outcome.status, outcome.attempts) == ("finished", 2)
    assert [died["rank"] for died in run.named("worker_died")] == [1]


def test_a_spare_rank_whose_code_is_wrong_ends_the_attempt(run: Run) -> None:
    """Another would meet the same exception: nobody goes on without it."""
    body = """
def main():
    if rank == 0:
        raise ValueError("the sample is broken")
    time.sleep(5)
    return 0
sys.exit(run_worker(main))
"""
    outcome = run(body, processes=3, spare=(0, 1))
    assert outcome.status == "failed"
    assert "the sample is broken" in outcome.message


def test_the_first_failure_is_told_once_although_a_peer_exits_first(run: Run) -> None:
    body = """
def main():
    if rank == 2:
        raise ValueError("the real mistake")
    while not (folder / "logs" / "rank-2.error.json").exists():
        time.sleep(0.005)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
code = run_worker(main)
if rank == 2:
    time.sleep(0.2)  # slow on its way out: the peers are seen to die first
sys.exit(code)
"""
    outcome = run(body, processes=3, restarts=0)
    assert (outcome.status, outcome.exit_code, outcome.attempts) == ("failed", 1, 1)
    assert outcome.message == (
        f"rank 2: worker_script.py:14: ValueError: the real mistake; before the first step, so it "
        f"is not tried again; traceback: {run.folder / 'logs' / 'rank-2.log'}"
    )
    (died,) = run.named("worker_died")
    assert died["fatal"]
    assert "run_worker" not in died["traceback"]
    assert died["traceback"].endswith("ValueError: the real mistake")


@pytest.mark.parametrize(
    ("error", "attempts"),
    chosen(
        [("ValueError('odd')", 1), ("TypeError('build() got width')", 1), ("KeyError(3)", 1),
         ("OSError(5, 'Input/output error')", 3), ("RuntimeError('CUDA error: busy')", 3),
         ("MemoryError()", 3), ("RuntimeError('Connection refused')", 3)],
        [("ValueError('odd')",), ("OSError(5, 'Input/output error')",)],
    ),
)  # fmt: skip
def test_an_exception_before_the_first_step_is_tried_once_unless_it_may_pass(
    run: Run, error: str, attempts: int
) -> None:
    """In `make test` the report of each says whether it may pass: launch/test_worker.py."""
    body = f"def main():\n    raise {error}\nsys.exit(run_worker(main))"
    outcome = run(body, processes=1, restarts=3)
    assert (outcome.exit_code, outcome.attempts) == (1, attempts)
    if attempts == 1:
        assert "\n" not in outcome.message
        assert "; before the first step, so it is not tried again; traceback: " in outcome.message


def test_after_a_step_an_exception_is_worth_another_start(run: Run) -> None:
    body = """
def main():
    if attempt == 0:
        step(1)
        time.sleep(0.2)
    if attempt < 2:
        raise ValueError(f"odd {attempt}")
    return 0
sys.exit(run_worker(main))
"""
    (run.folder / "checkpoints" / "step-1").mkdir(parents=True)
    (run.folder / "checkpoints" / "step-1" / "manifest.json").touch()
    assert run(body, processes=1).attempts == 3
    assert [e["saved"] for e in run.named("restarting")] == [1, 1]


def test_a_worker_that_reached_its_end_without_a_save_is_no_crash_and_no_success(run: Run) -> None:
    outcome = run("sys.exit(errors.UNSAVED_CODE)")
    assert (outcome.status, outcome.exit_code, outcome.attempts) == ("unsaved", 1, 1)
    assert run.named("worker_died") == []


def test_sigterm_to_one_worker_while_it_starts_asks_all_to_stop(run: Run) -> None:
    body = UP + "time.sleep(30 if rank else 0)\n"
    body += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    body += "os.kill(os.getpid(), signal.SIGTERM) if attempt else time.sleep(30)"

    def one() -> None:
        os.kill(run.named("worker_started")[1]["pid"], signal.SIGTERM)

    after(run, 0.2, one, "up-1")
    outcome = run(body)
    assert outcome == RunOutcome("stopped", 143, 1, "stopped by SIGTERM")
    assert [(e["signal"], e["rank"]) for e in run.named("stop_requested")] == [("SIGTERM", 1)]
    assert run.named("worker_died") == run.named("restarting") == []


def test_a_stop_waits_as_long_as_two_steps_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_grace, "LEAST_S", 0.1)
    body = """
step(1)
with open(folder / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 2, "step_s": 1.0}) + "\\n")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    after(run, 0.3, to_self(signal.SIGTERM))
    outcome = run(body + UP + "time.sleep(1.3)", processes=1)
    assert outcome == RunOutcome("stopped", 143, 1, "stopped by SIGTERM"), "it was waited for"
    told = [(e["step_s"], e["grace_s"]) for e in run.named("stop_requested")]
    assert told == [(1.0, 2.1)]


def test_the_grace_is_learnt_from_steps_and_saves_unless_it_is_said(tmp_path: Path) -> None:
    assert stop_grace.StopGrace(tmp_path, 0.0, 2).seconds(0.0) == 60
    log = EventLog(tmp_path / "events.jsonl", 0)
    for seconds in (20.0, 5.0):
        log.emit("checkpoint_saved", step=1, seconds=seconds)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"checkpoint_saved","seconds":"long"}\n\xff checkpoint_saved\n')
    assert stop_grace.StopGrace(tmp_path, 0.0, 2).seconds(4.0) == 60 + 2 * 4 + 3 * 20
    assert stop_grace.StopGrace(tmp_path, 25.0, 2).seconds(40.0) == 25, "what a scheduler waits"


@pytest.mark.parametrize("clock", ["", "time.time = lambda: 3600.0"], ids=["true", "set back"])
def test_a_failure_that_only_blames_a_peer_waits_for_the_peer(run: Run, clock: str) -> None:
    body = f"""
{clock}
def main():
    if rank == 1:
        (folder / "up-1").touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "up-1").exists():
        time.sleep(0.005)
    raise RuntimeError("Connection reset by peer")
sys.exit(run_worker(main))
"""
    outcome = run(body, restarts=0)
    assert "rank 1 (pid" in outcome.message
    assert "killed by SIGKILL (not by Shoal; often the kernel, out of memory)" in outcome.message


def test_a_rank_that_leaves_early_is_named_and_not_those_who_lose_it(run: Run) -> None:
    body = """
def main():
    if rank == 1:
        (folder / "up-1").touch()
        os._exit(0)
    while not (folder / "up-1").exists():
        time.sleep(0.005)
    raise RuntimeError("Connection closed by peer")
sys.exit(run_worker(main))
"""
    outcome = run(body, restarts=0, processes=3)
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert "rank 1 (pid" in outcome.message
    assert "left with status 0, before the run's end" in outcome.message


def test_a_worker_that_reports_an_error_but_hangs_does_not_hang_the_run(run: Run) -> None:
    body = """
def main():
    raise ValueError("then it hangs")
if rank == 0:
    run_worker(main)
time.sleep(30)
(folder / "slept").touch()
"""
    outcome = run(body, restarts=0)
    assert "then it hangs" in outcome.message
    assert not (run.folder / "slept").exists(), "its 30 s were waited for"


def test_restarts_run_out_and_the_last_traceback_is_the_message(run: Run) -> None:
    body = """
step(attempt)
def main():
    time.sleep(0.1)
    raise ValueError("again")
sys.exit(run_worker(main))
"""
    body = body.replace('"again"', 'f"again {attempt}"')
    outcome = run(body, processes=1, restarts=3)
    assert (outcome.status, outcome.exit_code, outcome.attempts) == ("failed", 1, 4)
    assert "gave up after 4 attempts, no restarts left" in outcome.message
    assert outcome.message.count("Traceback") == 1
    assert [e["fatal"] for e in run.named("worker_died")] == [False, False, False, True]


def test_the_same_exception_after_the_same_step_is_not_tried_a_third_time(run: Run) -> None:
    body = """
def main():
    (folder / "metrics.jsonl").write_text("")
    time.sleep(0.1)
    step(1)
    step(2)
    time.sleep(0.1)
    raise ValueError("sample 17 is odd")
sys.exit(run_worker(main))
"""
    outcome = run(body, processes=1, restarts=9)
    assert (outcome.exit_code, outcome.attempts) == (1, 2)
    assert "gave up after 2 attempts, the same failure after step 2. Log: " in outcome.message
    assert outcome.message.endswith("ValueError: sample 17 is odd")
    assert "Traceback" not in outcome.message, "it was shown when it first happened"


def test_the_same_failure_before_any_step_stops_after_three_attempts(run: Run) -> None:
    outcome = run("raise RuntimeError('cannot start')", processes=1, restarts=9)
    assert outcome.attempts == 3
    assert "gave up after 3 attempts, the same failure before any step" in outcome.message
    assert "RuntimeError: cannot start" in outcome.message  # no error file: the log's own end


def test_different_failures_at_start_use_all_restarts(run: Run) -> None:
    assert run("raise RuntimeError(attempt)", processes=1, restarts=4).attempts == 5


@pytest.mark.parametrize(("error", "code"), [("UserError", 2), ("TrainingError", 3)])
def test_what_a_restart_cannot_mend_is_not_restarted(run: Run, error: str, code: int) -> None:
    body = f"""
def main():
    raise errors.{error}("train.lr = −1: must be above 0; try: train.lr=0.001")
sys.exit(run_worker(main))
"""
    outcome = run(body)
    line = "train.lr = −1: must be above 0; try: train.lr=0.001"
    assert outcome == RunOutcome("failed", code, 1, line)
    assert run.named("restarting") == []


def test_a_stale_report_is_not_taken_for_a_new_failure(run: Run) -> None:
    (run.folder / "logs").mkdir()
    stale = run.folder / "logs" / "rank-0.error.json"
    stale.write_text(json.dumps({"kind": "UserError", "line": "old", "traceback": "",
                                 "exit_code": 2, "time_s": 0, "lost_peer": False}))  # fmt: skip
    assert run("").status == "finished"


@BOTH
def test_a_command_that_does_not_exist_is_one_line(run: Run) -> None:
    with pytest.raises(ClusterError, match="rank 0: its process cannot be started: no-such-prog"):
        supervise(["no-such-program"], processes=2, folder=run.folder, restarts=1, emit=run.emit)


@BOTH
def test_sigterm_reaches_every_worker_once_and_they_may_save(run: Run) -> None:
    body = (
        """
def save(number, frame):
    with open(folder / f"signals-{rank}", "a") as file:
        file.write("x")
    time.sleep(0.3)
    (folder / f"saved-{rank}").touch()
    sys.exit(143 if rank else 0)
signal.signal(signal.SIGTERM, save)
"""
        + UP
    )
    previous = signal.getsignal(signal.SIGTERM)
    after(run, 0.2, to_self(signal.SIGTERM), "up-1")
    outcome = run(body + "time.sleep(30)")
    assert outcome == RunOutcome("stopped", 143, 1, "stopped by SIGTERM")
    assert [e["signal"] for e in run.named("stop_requested")] == ["SIGTERM"]
    for rank in (0, 1):
        assert (run.folder / f"signals-{rank}").read_text() == "x"
        assert (run.folder / f"saved-{rank}").exists()
    assert signal.getsignal(signal.SIGTERM) is previous
    assert run.named("worker_died") == []


SAVES = """
def save(number, frame):
    (folder / f"saved-{rank}-{number}").touch()
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
"""


def test_sigusr1_asks_for_a_stop_as_slurm_does(run: Run) -> None:
    previous = signal.getsignal(signal.SIGUSR1)
    after(run, 0.1, to_self(signal.SIGUSR1), "up-1")
    outcome = run(SAVES + UP + "time.sleep(30)")
    assert outcome == RunOutcome("stopped", 138, 1, "stopped by SIGUSR1")
    assert [e["signal"] for e in run.named("stop_requested")] == ["SIGUSR1"]
    assert {p.name for p in run.folder.glob("saved-*")} == {"saved-0-15", "saved-1-15"}
    assert signal.getsignal(signal.SIGUSR1) is previous


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_of_the_tree_costs_no_save(run: Run, number: int) -> None:
    """As a scheduler sends it: what forks the workers, and who guards them, live on."""

    def all_of_them() -> None:
        for one in [*psutil.Process().children(recursive=True), psutil.Process()]:
            one.send_signal(number)

    after(run, 0.2, all_of_them, "up-1")
    outcome = run(SAVES + UP + "time.sleep(30)")
    assert outcome == RunOutcome(
        "stopped", 128 + number, 1, f"stopped by {signal.Signals(number).name}"
    )
    # One that is still in its handler when the supervisor's SIGTERM comes saves by that once more.
    assert {p.name.split("-")[1] for p in run.folder.glob("saved-*")} == {"0", "1"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_worker_that_is_asked_while_it_imports_ends_the_run_as_asked(
    run: Run, number: int
) -> None:
    body = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + UP + "time.sleep(30)"

    def one() -> None:
        os.kill(run.named("worker_started")[1]["pid"], number)

    after(run, 0.2, one, "up-1")
    name = "Ctrl-C" if number == signal.SIGINT else "SIGUSR1"
    assert run(body) == RunOutcome("stopped", 128 + number, 1, f"stopped by {name}")
    assert run.named("worker_died") == run.named("restarting") == []


def test_ctrl_c_asks_for_a_stop_with_sigterm(run: Run) -> None:
    after(run, 0.1, to_self(signal.SIGINT))
    outcome = run(UP + "time.sleep(30)", processes=1)
    assert outcome == RunOutcome("stopped", 130, 1, "stopped by Ctrl-C")


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + UP + "time.sleep(30)"


def test_workers_that_do_not_stop_in_time_are_killed(run: Run) -> None:
    after(run, 0.1, to_self(signal.SIGTERM))
    outcome = run(STUBBORN, processes=1, grace_s=0.4)
    assert outcome.exit_code == 143
    assert outcome.message == "stopped by SIGTERM; killed rank 0, still busy after 0 s"


def test_a_second_ctrl_c_kills_at_once_but_an_echo_does_not(run: Run) -> None:
    sent: list[float] = []
    for wait_s in (0.0, 0.2, 0.9):
        after(run, wait_s, lambda at=wait_s: (sent.append(at), to_self(signal.SIGINT)()))
    outcome = run(STUBBORN, processes=1)
    assert outcome.exit_code == 130
    assert "killed at the second Ctrl-C, before all was saved" in outcome.message
    assert sent == [0.0, 0.2, 0.9], "the echo after 0.2 s was taken for a second Ctrl-C"


def test_a_worker_that_fails_while_stopping_is_named(run: Run) -> None:
    body = """
def main():
    def save(number, frame):
        raise OSError("disk full")
    signal.signal(signal.SIGTERM, save)
    (folder / "up-0").touch()
    time.sleep(30)
    return 0
sys.exit(run_worker(main))
"""
    after(run, 0.1, to_self(signal.SIGTERM))
    outcome = run(body, processes=1)
    assert "rank 0 did not end cleanly: worker_script.py:14: OSError: disk full. Log: " in (
        outcome.message
    )


def test_workers_that_were_asked_directly_end_the_run_without_a_restart(run: Run) -> None:
    outcome = run("time.sleep(0.2 * rank)\nsys.exit(143)")
    assert outcome == RunOutcome("stopped", 143, 1, "stopped by SIGTERM")
    assert run.named("stop_requested") == []


def test_ticks_go_on_and_a_failing_one_leaves_no_worker(run: Run) -> None:
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 5:
            (run.folder / "five").touch()

    waits = "while not (folder / 'five').exists(): time.sleep(0.01)"
    run(waits, processes=1, on_tick=tick)
    assert len(ticks) >= 5
    assert TICK_EVERY_S == 0.1

    def fail() -> None:
        raise KeyError("drawing")

    with pytest.raises(KeyError):
        run("time.sleep(30)", processes=1, on_tick=fail)
    pid = run.named("worker_started")[-1]["pid"]
    assert not Path(f"/proc/{pid}").exists()


def test_states_move_only_as_the_table_says() -> None:
    supervisor = object.__new__(_Supervisor)
    supervisor.state = State.DONE
    with pytest.raises(BugError, match="no way from done to running"):
        supervisor.set_state(State.RUNNING)


def test_kills_from_outside_before_any_step_are_not_the_same_failure(run: Run) -> None:
    """Whoever kills workers while they start must not make the run give up early."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    outcome = run(script, processes=1, restarts=5)
    assert outcome.attempts == 6, "every restart that was allowed was used"
