"""Choice of the rank that failed first, with its own error: one failure gives one report.

When one rank dies, all others fail a moment later with "connection closed by peer", and any of them
may exit first. So the first failure is found by evidence, best first: a failure that does not
itself mention a lost peer, then the earliest. A rank killed by a signal left no error; it counts as
earlier than errors of the same second, which are its consequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from shoal.base.errors import UNSAVED_CODE, ClusterError, TrainingError
from shoal.launch.processes import Worker
from shoal.launch.stop_requests import ASKED
from shoal.launch.watch.blamed_rank import Hang

LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connectfullmesh",
    "remote process exited",
    "timed out waiting",
)
MAY_PASS = (
    "out of memory",
    "allocate memory",
    "cuda error",
    "cudnn",
    "nccl",
    "gloo",
    "address already in use",
    "temporarily unavailable",
)
"""Texts of exceptions that another start may not meet: of devices, links and memory."""
NOBODY: Mapping[int, str] = MappingProxyType({})
LOG_TAIL_LINES = 25
EXIT_PATIENCE_S = 0.5
STOPPED_CODE = 143
"""Exit code of a worker that saved and stopped because of a SIGTERM."""


@dataclass(frozen=True)
class ErrorReport:
    """Error report of a failing worker; the fields of `rank-K.error.json`.

    Attributes:
        time_s: wall-clock time, seconds since 1970, for a reader of the folder.
        certain: an exception that the same code and data meet again.
        monotonic_s: time on the monotonic clock of the machine. The supervisor orders failures by
            it, since the wall clock of a machine may jump.
    """

    kind: str
    line: str
    traceback: str
    exit_code: int
    time_s: float
    lost_peer: bool
    certain: bool = False
    monotonic_s: float = 0.0

    @staticmethod
    def of(failure: BaseException, *, exit_code: int, line: str, trace: str) -> ErrorReport:
        """Return the report of an exception that happened now."""
        text = str(failure).lower()
        ours = isinstance(failure, ClusterError)
        here = isinstance(failure, ClusterError) and failure.here
        lost = (ours and not here) or any(words in text for words in LOST_PEER)
        passing = isinstance(failure, (OSError, MemoryError)) or any(w in text for w in MAY_PASS)
        kind, now_s = type(failure).__name__, time.time()
        certain = not (lost or passing or ours)
        return ErrorReport(kind, line, trace, exit_code, now_s, lost, certain, time.monotonic())


def write_report(path: Path, report: ErrorReport) -> None:
    """Write a report atomically; on a full disk the error is in the log only."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
        os.replace(draft, path)


def read_report(path: Path) -> ErrorReport | None:
    """Return the report at `path`, or None if there is none that can be read."""
    try:
        return ErrorReport(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class WorkerDeath:
    """The first failure of an attempt.

    Attributes:
        code: exit code, or minus the number of the signal.
        words: its own traceback, else its one line, else the end of its log; empty if it wrote
            nothing.
        line: one line with the same meaning.
        seen_s: time on the monotonic clock at which it failed, or its end was noticed.
        certain: an exception that the same code and data meet again.
        hung: it did not die: the others waited for it, and it was ended with them.
        final: another start would fail in the same way, whatever the code.
    """

    rank: int
    pid: int
    code: int
    words: str
    line: str
    log_path: Path
    lost_peer: bool
    seen_s: float
    certain: bool = False
    hung: bool = False
    final: bool = False

    @property
    def how(self) -> str:
        """Return how the worker ended, as text."""
        return "ended by the watch" if self.hung else exit_text(self.code)

    def same_as(self, other: WorkerDeath) -> bool:
        """Return whether two attempts failed in the same way, on any rank.

        A SIGKILL comes from outside and predicts nothing about a further attempt.
        """
        if self.code == -signal.SIGKILL:
            return False
        return (self.code, self.line) == (other.code, other.line)


def exit_text(code: int) -> str:
    """Return an exit status as text.

    >>> exit_text(-9), exit_text(1)
    ('killed by SIGKILL', 'exit code 1')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def make_hang_death(worker: Worker, hang: Hang) -> WorkerDeath:
    """Return the failure of a rank that the others waited for, and write its report."""
    line, now_s = hang.line, time.monotonic()
    code = hang.status or (TrainingError.exit_code if hang.unlike else 1)
    report = ErrorReport("Hang", line, "", code, time.time(), lost_peer=False, monotonic_s=now_s)
    write_report(worker.error_path, report)
    return WorkerDeath(
        worker.rank, worker.pid, code, line, line, worker.log_path, False, now_s, hung=True,
        final=hang.unlike,
    )  # fmt: skip


def select_first_death(
    workers: Sequence[Worker], left: Mapping[int, str] = NOBODY
) -> WorkerDeath | None:
    """Return the failure that caused the others; None while there is none, or it is too early.

    A worker that reported an error counts even if it hangs during its exit. While the only failures
    are those of ranks that lost a peer, the peer's own death is awaited for half a second; after
    that a rank that ended with status 0 is blamed, if there is one.

    Args:
        left: ranks that ended with status 0 without closing their page, and their positions.
    """
    found = [death for worker in workers if (death := _read_death(worker)) is not None]
    best = min(found, key=lambda death: (death.lost_peer, death.seen_s), default=None)
    gone = [worker for worker in workers if worker.rank in left]
    if gone and (best is None or best.lost_peer):
        first = min(gone, key=lambda worker: worker.ended_s)
        return _make_early_exit_death(first, left[first.rank])
    if best is None:
        return None
    others_run = any(worker.code is None for worker in workers)
    if best.lost_peer and others_run and time.monotonic() - best.seen_s < EXIT_PATIENCE_S:
        return None
    ended = [worker for worker in workers if worker.code == 0]
    if best.lost_peer and ended:
        return _make_early_exit_death(min(ended, key=lambda worker: worker.ended_s), "")
    return best


def _make_early_exit_death(worker: Worker, where: str) -> WorkerDeath:
    """Return the failure of a rank that ended as if the run were done, and write its report."""
    line = f"left with status 0{where}, before the run's end: something in it calls os._exit(0)"
    log, seen_s = worker.log_path, worker.ended_s
    report = ErrorReport("Left", line, "", 1, time.time(), lost_peer=False, monotonic_s=seen_s)
    write_report(worker.error_path, report)
    return WorkerDeath(worker.rank, worker.pid, 0, line, line, log, False, seen_s)


def format_certain_failure(death: WorkerDeath, processes: int) -> str:
    """Return one line about an exception before any step, which would occur again."""
    more = f"; traceback: {death.log_path}" if death.words else ""
    who = f"rank {death.rank}: " if processes > 1 else ""
    return f"{who}{death.line}; before the first step, so it is not tried again{more}"


def format_death(death: WorkerDeath, attempts: int, alike: str) -> str:
    """Return why a run is given up: the blamed rank, the attempts, its log, its error.

    Args:
        alike: where the attempts failed in the same way; empty if they did not.
    """
    why = f"the same failure {alike}" if alike else "no restarts left"
    if attempts == 1 and not alike:
        tries = "restarts are off"
    else:
        tries = f"gave up after {attempts} attempts, {why}"
    unsent = " (not by Shoal; often the kernel, out of memory)" if death.code == -9 else ""
    head = f"rank {death.rank} (pid {death.pid}): {death.how}{unsent}; {tries}"
    return "\n".join(filter(None, [f"{head}. Log: {death.log_path}", death.words]))


def _read_death(worker: Worker) -> WorkerDeath | None:
    # A signal that ends a worker while it starts asks for a stop, as one in training does.
    if worker.code in (0, STOPPED_CODE, UNSAVED_CODE, *ASKED):
        return None
    report = read_report(worker.error_path)
    if report is None:
        if worker.code is None:
            return None
        words = "" if worker.code == -signal.SIGKILL else _log_tail(worker)
        line = words.splitlines()[-1].strip() if words else exit_text(worker.code)
        # gloo aborts as a consequence of other failures; every other signal is a cause.
        lead_s = 1.0 if worker.code < 0 and worker.code != -signal.SIGABRT else 0.0
        return WorkerDeath(
            worker.rank, worker.pid, worker.code, words, line, worker.log_path,
            False, worker.ended_s - lead_s,
        )  # fmt: skip
    if worker.code is None and time.monotonic() - report.monotonic_s < EXIT_PATIENCE_S:
        return None
    words = report.traceback or report.line
    return WorkerDeath(
        worker.rank, worker.pid, report.exit_code, words, report.line, worker.log_path,
        report.lost_peer, report.monotonic_s, report.certain,
    )  # fmt: skip


def _log_tail(worker: Worker) -> str:
    try:
        with worker.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(worker.log_start, end - 8192))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL_LINES:])
