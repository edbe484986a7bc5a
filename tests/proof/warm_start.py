"""Runs `shoal train` in a process that has imported torch already: a start costs a fork.

The command itself is the real one: it checks the request, writes the run folder, supervises as many
worker processes as there are ranks, kills and restarts them. Two things are left out. Imports are
spent once instead of in every process (…_IMPORTS_S); and this machine's rates are not measured, of
which nothing depends but what is foreseen and printed. Whoever imports this must have no threads: a
fork copies none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.cli import start
from shoal.launch import supervisor
from shoal.launch.processes import Guardian, Worker
from shoal.launch.worker_errors import run_worker

WANTED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch._refs", "torch.distributed.fsdp"),
    *(
        "torch.fx.experimental.proxy_tensor",
        "shoal.trainer.main_job",
        "shoal.parallel.data_parallel.fsdp",
    ),
    *("shoal.parallel.context_parallel", "shoal.parallel.expert_parallel"),
    *("shoal.parallel.pipeline", "shoal.parallel.tensor_parallel", "transformers"),
)
"""What workers import."""

FORESEES = "COMPOSITION_FORESEES"
"""Environment variable: "0" for a start that says nothing of its steps' expected time."""

COLD = 77
"""Exit code of a command that would start workers, where nothing was imported for them."""

COMMAND_IMPORTS_S, WORKER_IMPORTS_S = 0.4, 3.1
"""CPU seconds that a command and each of its workers would spend on that, on a busy machine."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    code       its exit code; −9 where it did not end in time · text  what it printed, in full
    cpu_s      of the command and all its workers, of whom there were `workers`
    command_s  CPU seconds of the command alone
    """

    code: int
    text: str
    wall_s: float
    cpu_s: float
    command_s: float
    workers: int

    @property
    def alone_s(self) -> float:
        """Seconds that it would take on a machine with a core for each worker and nothing else.

        CPU seconds of the command and of one worker, and what both would spend on imports.
        """
        own_s = COMMAND_IMPORTS_S + self.command_s
        if not self.workers:
            return own_s
        return own_s + WORKER_IMPORTS_S + (self.cpu_s - self.command_s) / self.workers

    @property
    def line(self) -> str:
        """The line that says why it failed."""
        said = [one for one in self.text.splitlines() if one.startswith("shoal: ")]
        return said[-1].removeprefix("shoal: ") if said else self.text[-300:]


def warm() -> None:
    """Import what workers would; before it, commands end where they would start some (COLD)."""
    for name in WANTED:
        importlib.import_module(name)


def train(words: Sequence[str], folder: Path, environ: dict[str, str], deadline_s: float) -> Ended:
    """`shoal train` with these words in a folder, as a process with workers of its own."""
    log = folder / "command.log"
    for old in (log, folder / SPENT):
        old.unlink(missing_ok=True)
    gc.collect()
    gc.freeze()  # a fork's collector would touch, so copy, every page
    began_s, spent_s = time.monotonic(), _spent_s()
    child = os.fork()
    if child == 0:
        _as_command(words, folder, environ, log)
    code = _wait(child, began_s + deadline_s)
    wall_s = time.monotonic() - began_s
    text = log.read_text(errors="replace") if log.exists() else ""
    cpu_s = _spent_s() - spent_s
    try:
        command_s, workers = json.loads((folder / SPENT).read_text())
    except (OSError, ValueError):  # it was killed
        command_s, workers = cpu_s, 0
    return Ended(code, text, wall_s, cpu_s, command_s, workers)


SPENT = "spent.json"


def _spent_s() -> float:
    """CPU seconds of all children that ended."""
    times = os.times()
    return times.children_user + times.children_system


def apart(work: Any) -> Any:
    """What `work()` gives, run in a process of its own: torch starts threads when it computes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = json.dumps({"ok": work()})
        except BaseException:
            told = json.dumps({"error": traceback.format_exc()})
        with os.fdopen(writing, "w") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["ok"]


def _wait(child: int, until_s: float) -> int:
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its workers die with it
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _as_command(words: Sequence[str], folder: Path, environ: dict[str, str], log: Path) -> None:
    """What the forked process does; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        _print_to(log)
        os.environ.clear()
        os.environ.update(environ)
        sys.path.insert(0, str(folder))
        supervisor.Worker = Forked  # type: ignore[misc]
        supervisor.can_fork = lambda: False  # type: ignore[assignment]
        try:
            # As `shoal train` does, which would be slower to reach through its parser.
            resume = Path(words[1]) if words[0] == "--resume" else None
            prepared = start.prepare_run(list(words[2:] if resume else words), resume)
            if WANTED[-1] not in sys.modules:
                os._exit(COLD)
            _measure_nothing(environ.get(FORESEES) != "0")
            code = start.launch_run(prepared, dict(os.environ))
        except ShoalError as failure:
            sys.stderr.write(f"shoal: {failure}\n")
            code = failure.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            times = os.times()
            told = [times.user + times.system, Forked.started]
            (folder / SPENT).write_text(json.dumps(told))
        os._exit(code)


def _measure_nothing(foresees: bool) -> None:
    """Leave out what is only printed: this machine's rates, and unless `foresees`, the plan's."""
    matmul, loop = (sys.modules[f"shoal.{name}"] for name in ("profile.matmul", "trainer.loop"))
    given: dict[str, Any] = {"measure_machine": lambda *_: {}}
    if not foresees:
        given |= {"foresee": lambda *_: {}, "_count_flops": lambda *_: None}
    vars(loop).update(given)
    vars(matmul)["_measure"] = lambda *_: (1e10, True)


def _print_to(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)


class _Process:
    """What `Worker` asks of a child, as `subprocess.Popen` answers it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float) -> int:
        until_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.01)
        return self.code or 0

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Forked(Worker):
    """A worker that is forked instead of executed; the rest is the supervisor's own.

    started   how many there were
    """

    started = 0

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], watched_by: Guardian, _: None = None
    ) -> None:
        folder, self.rank = Path(environ["SHOAL_RUN_FOLDER"]), int(environ["RANK"])
        self.log_path = folder / "logs" / f"rank-{self.rank}.log"
        self.error_path = folder / "logs" / f"rank-{self.rank}.error.json"
        self.guardian = watched_by
        self.code = None
        self.ended_s = 0.0
        with self.log_path.open("ab") as log:
            log.write(f"--- rank {self.rank}, attempt {environ['SHOAL_ATTEMPT']}\n".encode())
            log.flush()
            self.log_start = log.tell()
        Forked.started += 1
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _as_worker(command, environ, self.log_path, parent)
        self.process = _Process(pid)  # type: ignore[assignment]
        self.pid = pid
        self.guardian.register("+", pid)


def _as_worker(command: Sequence[str], environ: dict[str, str], log: Path, parent: int) -> None:
    """What a forked worker does; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the supervisor
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _print_to(log)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = list(command[2:])
        from shoal.cli.workers import worker

        code = run_worker(worker.main)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
