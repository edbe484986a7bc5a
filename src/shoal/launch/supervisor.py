"""Supervisor of N workers: start all, and when one dies end all and start them again.

    STARTING → RUNNING → DONE                 all workers exit with 0
                       → RESTARTING → STARTING   one died and restarts are left
                       → STOPPING → DONE      a signal asked for a clean stop

Every attempt uses a fresh store under a fresh name; stock restarts that reuse both came back in
4 of 10 trials. The workers resume by themselves from the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shoal.base.errors import UNSAVED_CODE, BugError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.runlog.damaged_lines import Record, is_number, parse_step
from shoal.base.runlog.events import Emit
from shoal.base.runlog.folder_owner import REPLACED, FolderOwner
from shoal.launch.processes import (
    ForkServer,
    Guardian,
    JoinedForkServer,
    PrivateStore,
    Worker,
    can_fork,
    make_shared_environment,
    make_worker_environment,
)
from shoal.launch.stop_grace import StopGrace
from shoal.launch.stop_requests import ASKED, StopSignals
from shoal.launch.watch.hang_watch import OTHER_FIRST_S, HangWatch
from shoal.launch.worker_failures import (
    STOPPED_CODE,
    WorkerDeath,
    exit_text,
    format_certain_failure,
    format_death,
    make_hang_death,
    select_first_death,
)

LOOK_EVERY_S = 0.03
TICK_EVERY_S = 0.1
SAME_FAILURES = 3
BROKEN_STOP_S = 5.0
TAIL_BYTES = 16384
"""Bytes read from the end of metrics.jsonl: its last rows."""
ENDED = (0, STOPPED_CODE, UNSAVED_CODE)
"""Exit codes of workers that ended by themselves."""
NO_RESTART_CODES = (2, 3)
"""2: the user must change something; 3: the numbers are at fault and would be so again."""


class State(Enum):
    """State of the supervisor; `NEXT` holds the allowed transitions."""

    STARTING = "starting"
    """workers are being started → RUNNING; → DONE if a stop was requested just before"""
    RUNNING = "running"
    """workers train → RESTARTING, STOPPING, DONE"""
    STOPPING = "stopping"
    """workers were asked to save and exit → DONE"""
    RESTARTING = "restarting"
    """one died, the rest was killed → STARTING"""
    DONE = "done"
    """no worker is left → nothing"""


NEXT = {
    State.STARTING: {State.RUNNING, State.DONE},
    State.RUNNING: {State.RESTARTING, State.STOPPING, State.DONE},
    State.STOPPING: {State.DONE},
    State.RESTARTING: {State.STARTING},
    State.DONE: set(),
}


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a supervised run.

    Attributes:
        status: finished, stopped (a signal asked for it), unsaved (it ended or stopped, and could
            not save) or failed.
        exit_code: 0 finished · 130, 143, 138, 129 stopped by Ctrl-C, SIGTERM, SIGUSR1, a closed
            terminal · 1 failed, unsaved · 2 the user must change something · 3 the numbers are at
            fault.
        attempts: how often the workers were started.
        message: for a person: empty if finished; if failed, the blamed rank and its traceback,
            once; if stopped, by what, and after a ";" what went wrong.
    """

    status: str
    exit_code: int
    attempts: int
    message: str


def supervise(
    command: Sequence[str],
    *,
    processes: int,
    folder: Path,
    restarts: int,
    emit: Emit,
    on_tick: Callable[[], None] = lambda: None,
    environ: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
    patience_s: float = 60.0,
    first_s: float = OTHER_FIRST_S,
    grace_s: float = 0.0,
    steps_to_save: int = 2,
    spare: Collection[int] = (),
    fork_channel: int = -1,
) -> RunOutcome:
    """Run `processes` workers of `command` to the end, restarting all of them after a crash.

    Call it from the main thread: it replaces the handlers of STOP_SIGNALS (stop_requests.py), and
    restores them.

    Args:
        command: PYTHON -m MODULE ARGUMENT…; any program if `imports` is empty.
        folder: the run folder: `logs/` is written, `metrics.jsonl` is watched for progress.
        restarts: how many times the workers may be started again.
        emit: receives worker_started, worker_died, restarting, stop_requested, hang.
        on_tick: called about ten times a second, for drawing; keep it under 50 ms.
        environ: of the workers; default: this process's.
        imports: modules that every worker needs and that take time: imported once for all of them
            and for every restart, by a process that then forks the workers (fork_server.py).
        patience_s: seconds to wait for a rank that the others wait for, and that may only be slow,
            after it was reported (`watch/hang_watch.py`); then it counts as dead.
        first_s: seconds that all may be silent in phases that the watch has not learnt yet.
        grace_s: seconds that workers may take to save after a stop request; 0: learnt, a minute,
            `steps_to_save` of the longest recent steps and three of the longest recent saves.
        spare: ranks without which the others continue, as long as one of them lives: those that a
            signal ends are dropped, until all are started again.
        fork_channel: open file of a channel to a fork server that another process started with
            these imports and this environment (`ForkServer.open_channel`); −1: there is none.

    Raises:
        ClusterError: a process cannot be started at all.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with StopSignals() as stop, contextlib.closing(Guardian()) as guardian:
        base = os.environ if environ is None else environ
        shared = make_shared_environment(base, processes)
        run = _Supervisor(
            command, processes, folder, restarts, emit, on_tick, stop, guardian, imports
        )
        run.spare = frozenset(spare)
        if fork_channel >= 0:
            run.imports, run.server = imports, JoinedForkServer(fork_channel, shared)
        run.watcher = HangWatch(folder, emit, patience_s, run.progress.times_s, first_s=first_s)
        try:
            return run.run(shared, StopGrace(folder, grace_s, steps_to_save))
        finally:
            run.kill_all()
            run.end_fork_server()
            run.store.close()
            run.watcher.close()


class _Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        folder: Path,
        restarts: int,
        emit: Emit,
        on_tick: Callable[[], None],
        stop: StopSignals,
        guardian: Guardian,
        imports: Sequence[str],
    ) -> None:
        self.command, self.processes, self.folder = command, processes, folder
        self.restarts, self.emit, self.on_tick = restarts, emit, on_tick
        self.stop, self.guardian = stop, guardian
        self.state = State.STARTING
        self.watcher: HangWatch
        self.spare = frozenset[int]()
        self.left_out: set[int] = set()
        self.workers: list[Worker] = []
        self.attempt = 0
        self.owner = FolderOwner(folder)
        self.owner.record_with_owner()
        self.progress = MetricsProgress(folder / "metrics.jsonl")
        self.alike: list[WorkerDeath] = []  # equal failures of the last attempts that made no step
        self.died_after = 0  # the last step of the attempt before
        self.next_tick_s = 0.0
        shared = processes > 1 or restarts > 0
        self.imports = imports if shared and can_fork() else ()
        self.server: ForkServer | None = None
        self.store = PrivateStore()

    def run(self, shared: Mapping[str, str], grace: StopGrace) -> RunOutcome:
        """Run attempts until the run ends."""
        while self.stop.first is None:
            self.start_fork_server(shared)
            if self.stop.first is not None:
                break
            self.start_workers(shared)
            death = self.wait_for_death()
            if self.stop.first is not None or self.was_stopped_directly():
                return self.stop_workers(grace)
            if death is None:
                self.set_state(State.DONE)
                return self.make_finished_outcome()
            self.kill_all()
            if outcome := self.record_death(death):
                return outcome
            self.set_state(State.RESTARTING)
            self.attempt += 1
            saved = max(list_saved_steps(self.folder), default=None)
            self.emit("restarting", attempt=self.attempt, of=self.restarts, saved=saved)
            self.set_state(State.STARTING)
        self.set_state(State.DONE)
        return self.make_stopped_outcome(self.stop.first, "")

    def start_fork_server(self, shared: Mapping[str, str]) -> None:
        """Start the fork server if this platform supports it, and wait for its imports."""
        if self.server is not None and self.server.cannot:  # it was killed
            self.end_fork_server()
        if self.server is None and self.imports:
            self.server = ForkServer(self.imports, shared, self.folder)
            self.guardian.register("+", self.server.pid)
        while self.server and not (self.server.ready or self.stop.first):
            self.server.poll()
            if self.server.cannot:  # the workers will report the failure of the imports themselves
                self.imports = ()
                self.end_fork_server()
            else:
                self.pause()
        if self.server:
            self.guardian.register("+", self.server.pid)  # of a joined one it is known only now

    def end_fork_server(self) -> None:
        """End the fork server, if there is one."""
        if self.server is not None:
            self.server.close()
            self.guardian.register("-", self.server.pid)
            self.server = None

    def start_workers(self, shared: Mapping[str, str]) -> None:
        """Start every worker of one attempt."""
        self.workers, self.left_out = [], set()
        self.progress.start_attempt()
        for stale in (self.folder / "logs").glob("rank-*.error.json"):
            stale.unlink(missing_ok=True)
        pages = self.watcher.start_attempt(self.processes)
        self.store.close()
        self.store = PrivateStore()
        for rank in range(self.processes):
            environ = make_worker_environment(
                shared,
                rank=rank,
                processes=self.processes,
                attempt=self.attempt,
                folder=self.folder,
                store=self.store.path,
                page=pages[rank] if pages else "",
            )
            worker = Worker(self.command, environ, self.guardian, self.server)
            self.workers.append(worker)
            self.emit("worker_started", rank=rank, pid=worker.pid, attempt=self.attempt)
        self.set_state(State.RUNNING)

    def wait_for_death(self) -> WorkerDeath | None:
        """Wait until a worker dies; return None if all are done, or a stop is requested."""
        while self.stop.first is None and not self.was_stopped_directly():
            codes = self.poll_workers()
            counted = self.required_workers()
            left = self.watcher.left(counted)
            if (death := select_first_death(counted, left)) is not None:
                unlike = self.watcher.compare(self.workers, dead=True)
                return make_hang_death(self.workers[unlike.rank], unlike) if unlike else death
            if (hang := self.watcher.poll(counted)) is not None:
                return make_hang_death(self.workers[hang.rank], hang)
            if all(code in (0, UNSAVED_CODE) for code in codes):
                return None
            self.pause()
        return None

    def required_workers(self) -> list[Worker]:
        """Return the workers without dropped spare ranks; report each dropped rank once."""
        lives = any(self.workers[rank].code is None for rank in self.spare)
        for rank in self.spare - self.left_out if lives else ():
            code = self.workers[rank].code
            if code is not None and code < 0 and -code not in ASKED:
                self.left_out.add(rank)
                text = f"rank {rank} was {exit_text(code)}, and the others go on without it"
                self.emit("notice", text=text)
        return [worker for worker in self.workers if worker.rank not in self.left_out]

    def was_stopped_directly(self) -> bool:
        """Return whether a worker ended after, or by, a SIGTERM that was sent to it directly."""
        return any(worker.code in (STOPPED_CODE, *ASKED) for worker in self.workers)

    def make_finished_outcome(self) -> RunOutcome:
        """Return the outcome of workers that all ended by themselves."""
        attempts = self.attempt + 1
        if any(worker.code == UNSAVED_CODE for worker in self.workers):
            return RunOutcome("unsaved", 1, attempts, "the last checkpoint could not be written")
        return RunOutcome("finished", 0, attempts, "")

    def record_death(self, death: WorkerDeath) -> RunOutcome | None:
        """Record a death; return the outcome if it was the last one, None for another attempt."""
        self.alike = [earlier for earlier in self.alike if death.same_as(earlier)] + [death]
        told_before = len(self.alike) > 1
        step, self.died_after = self.died_after, self.progress.last_step()
        repeats = death.certain or death.hung
        again = told_before and repeats and self.died_after == step
        if self.progress.made:
            self.alike = self.alike[-1:] if repeats else []
        hopeless = again or len(self.alike) >= SAME_FAILURES
        final_code = death.final or death.code in NO_RESTART_CODES
        certain = death.certain and not self.progress.ever
        replaced = self.owner.state() == REPLACED
        hopeless = hopeless or replaced
        fatal = final_code or certain or hopeless or self.attempt >= self.restarts
        self.emit(
            "worker_died",
            rank=death.rank,
            pid=death.pid,
            how=death.how,
            attempt=self.attempt,
            traceback=death.words,
            fatal=fatal,
        )
        if not fatal:
            return None
        self.set_state(State.DONE)
        attempts = self.attempt + 1
        if final_code:
            more = f"; more in {death.log_path}" if death.words not in ("", death.line) else ""
            return RunOutcome("failed", death.code, attempts, death.line + more)
        if certain:
            return RunOutcome("failed", 1, attempts, format_certain_failure(death, self.processes))
        if replaced:
            line = f"rank {death.rank}: {death.line}; not started again: {self.folder} is another"
            return RunOutcome("failed", 1, attempts, f"{line} run's folder now")
        # The traceback of an equal death was shown when it first happened.
        last = dataclasses.replace(death, words=death.line) if told_before else death
        alike = f"after step {step}" if again else "before any step" if hopeless else ""
        return RunOutcome("failed", 1, attempts, format_death(last, attempts, alike))

    def stop_workers(self, grace: StopGrace) -> RunOutcome:
        """Ask every worker to save and exit; kill those that do not within the time limit."""
        self.set_state(State.STOPPING)
        ended = [worker for worker in self.workers if worker.code in ASKED]
        number = self.stop.first or (-(ended[0].code or 0) if ended else signal.SIGTERM)
        step_s = self.progress.step_s() if self.progress.made else 0.0
        grace_s = grace.seconds(step_s)
        if self.stop.first is not None or ended:
            about: dict[str, float] = {"rank": ended[0].rank} if self.stop.first is None else {}
            name = signal.Signals(number).name
            about = {**about, "step_s": round(step_s, 1), "steps": self.progress.ever}
            about["grace_s"] = round(grace_s, 1)
            self.emit("stop_requested", signal=name, **about)
            for worker in self.workers:
                worker.ask_to_stop()
        deadline_s = time.monotonic() + grace_s
        broken = False
        while None in (codes := self.poll_workers()) and not self.stop.insists:
            if not broken and any(code not in (None, *ENDED) for code in codes):
                # The others wait for a dead rank: they can only do what takes a short time.
                broken, deadline_s = True, min(deadline_s, time.monotonic() + BROKEN_STOP_S)
            if time.monotonic() > deadline_s:
                break
            self.pause()
        late = [str(worker.rank) for worker in self.workers if worker.code is None]
        self.kill_all()
        self.set_state(State.DONE)
        return self.make_stopped_outcome(number, self.describe_stop_failure(late, grace_s, broken))

    def describe_stop_failure(self, late: list[str], grace_s: float, broken: bool) -> str:
        """Return what went wrong during a stop, as text; "" if nothing did."""
        for worker in self.required_workers():
            if worker.code not in (*ENDED, *ASKED) and str(worker.rank) not in late:
                death = select_first_death([worker])
                line = death.line if death else exit_text(worker.code or 0)
                return f"; rank {worker.rank} did not end cleanly: {line}. Log: {worker.log_path}"
        if late and self.stop.insists:
            return "; killed at the second Ctrl-C, before all was saved"
        if late:
            waited_s = min(grace_s, BROKEN_STOP_S) if broken else grace_s
            return f"; killed rank {', '.join(late)}, still busy after {waited_s:.0f} s"
        return ""

    def make_stopped_outcome(self, number: int, trouble: str) -> RunOutcome:
        """Return the outcome of a run that was asked to stop by signal `number`."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        return RunOutcome("stopped", 128 + number, self.attempt + 1, f"stopped by {name}{trouble}")

    def poll_workers(self) -> list[int | None]:
        """Return the present exit code of every worker, except dropped ones."""
        self.progress.poll()
        codes = {worker.rank: worker.poll() for worker in self.workers}
        return [code for rank, code in codes.items() if rank not in self.left_out]

    def pause(self) -> None:
        """Sleep until the next check; call `on_tick` when it is time."""
        if time.monotonic() >= self.next_tick_s:
            self.on_tick()
            self.next_tick_s = time.monotonic() + TICK_EVERY_S
        time.sleep(LOOK_EVERY_S)

    def kill_all(self) -> None:
        """Kill every worker and its children, and wait until they are gone."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            if not worker.wait_killed():
                self.emit("notice", text=f"rank {worker.rank} (pid {worker.pid}): does not die")

    def set_state(self, state: State) -> None:
        """Change the state; raise BugError if the table does not allow it."""
        if state not in NEXT[self.state]:
            raise BugError(f"supervisor: no way from {self.state.value} to {state.value}")
        self.state = state


class MetricsProgress:
    """Progress of the attempts in `metrics.jsonl`, which a resume may first cut back.

    `times_s()` of this attempt's steps · `step_s()` the longest of the last ones · `last_step()`

    Attributes:
        made: this attempt has made progress.
        ever: any attempt has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False
        self.ever = False
        self.size_bytes = self.began_bytes = 0

    def start_attempt(self) -> None:
        """Forget earlier progress: note the size of `metrics.jsonl` at the start of an attempt."""
        self.made, self.size_bytes = False, self._size()
        self.began_bytes = self.size_bytes

    def times_s(self) -> list[float]:
        """Return the seconds of this attempt's last steps."""
        if self._size() <= self.began_bytes:
            return []  # cut back by a resume: the rows may be of an earlier attempt
        times = [row.get("step_s") for row in self._last_rows(self.began_bytes)]
        return [time_s for time_s in times if is_number(time_s)]

    def poll(self) -> None:
        """Compare the file's size with the last call."""
        size_bytes = self._size()
        self.made = self.made or size_bytes > self.size_bytes
        self.ever = self.ever or self.made
        self.size_bytes = size_bytes

    def step_s(self) -> float:
        """Return the seconds of the longest of the last steps; 0 before the first."""
        times = [row.get("step_s") for row in self._last_rows()]
        return max((time_s for time_s in times if is_number(time_s)), default=0.0)

    def last_step(self) -> int:
        """Return the newest step; 0 before the first."""
        return max((int(row["step"]) for row in self._last_rows()), default=0)

    def _last_rows(self, least_bytes: int = 0) -> list[Record]:
        """Return the last rows of the file, none of which begins before `least_bytes`."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(least_bytes, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                rows = [parse_step(line) for line in file.read().splitlines()]
        except OSError:
            return []
        return [row for row in rows if row is not None]

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
