"""Worker processes: their environment, their start, and the end of them and their children.

Environment variables give a worker its rank (read by `fabric/rendezvous/process_info.py`):
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE   as torchrun names them
  SHOAL_STORE                                      the file of the ranks' rendezvous store
  SHOAL_ATTEMPT, SHOAL_RUN_FOLDER                  the number of restarts; where to report
  SHOAL_WATCH_PAGE                                 the page in which it reports progress; or empty

Nothing survives the run: each worker leads its own session, so one signal to its process group
reaches its loader processes too. The kernel kills it when the supervisor dies (parent-death signal,
prctl(2)); `guardian.py` then kills the processes that it had started. No other user can reach the
ranks' store (`PrivateStore`); torch alone would listen on all interfaces, without authentication.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal.base.errors import ClusterError
from shoal.base.estimates.facts import host_memory_variables, usable_cores
from shoal.base.operating_systems import loopback_interface
from shoal.base.runlog.folder_owner import FolderOwner
from shoal.launch import guardian
from shoal.wire.watch_page import PAGE_VARIABLE

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
KILL_WAIT_S = 10.0
MESSAGE_BYTES = 1 << 17
FORK_S = 30.0
"""Seconds that a fork may take: of 300 MiB of page tables on a machine that swaps."""


class PrivateStore:
    """File of the rendezvous store of one attempt: torch's FileStore reads and writes it.

    Linux    memory without a name (memfd), which only processes that may inspect this one can open,
             by /proc/PID/fd. It ends with this process, needs no disk, and no cleaner deletes it
    others   a file in a folder of mode 0700, removed by `close`

    Attributes:
        path: by which this user's processes open it, and no other user's.

    References:
        memfd_create(2); proc_pid_fd(5): permission to follow is PTRACE_MODE_READ_FSCREDS.
    """

    def __init__(self) -> None:
        self._folder, self._file = "", -1
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("shoal-store")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
            if os.access(self.path, os.R_OK | os.W_OK):  # /proc is mounted
                return
            self.close()
        self._folder = tempfile.mkdtemp(prefix="shoal-store-")
        self.path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Delete the store; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._file = "", -1


def free_port() -> int:
    """Return a port of loopback at which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free_port(port: int) -> bool:
    """Return whether no process listens at a port of loopback at the moment."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError):
            return False
    return True


def make_shared_environment(base: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return the environment that all workers share: the caller's, with defaults.

    >>> make_shared_environment({"OMP_NUM_THREADS": "7"}, 2)["OMP_NUM_THREADS"]
    '7'
    """
    # Without a limit every rank would start one thread per core, and the threads would compete.
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its own stack traces would hide the line that counts
        "PYTHONFAULTHANDLER": "1",
        **host_memory_variables(),
    }
    # The output of workers goes into Shoal's files, whatever encoding the terminal has.
    return {**defaults, **base, "PYTHONIOENCODING": "utf-8:backslashreplace"}


def make_worker_environment(
    shared: Mapping[str, str],
    *,
    rank: int,
    processes: int,
    attempt: int,
    folder: Path,
    store: str,
    page: str = "",
) -> dict[str, str]:
    """Return the environment of one worker: the shared one, its rank variables, and its page.

    >>> found = make_worker_environment(
    ...     {"RANK": "9"}, rank=1, processes=2, attempt=0, folder=Path("/run"), store="/proc/9/fd/5"
    ... )
    >>> found["RANK"], found["WORLD_SIZE"], found["SHOAL_STORE"]
    ('1', '2', '/proc/9/fd/5')
    """
    return {
        **shared,
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "SHOAL_STORE": store,
        "SHOAL_ATTEMPT": str(attempt),
        "SHOAL_RUN_FOLDER": str(folder.absolute()),
        PAGE_VARIABLE: page,
    }


def make_parent_death_hook(parent: int) -> Callable[[], None] | None:
    """Return a `preexec_fn` with which a child is killed (SIGKILL) when its parent ends.

    Args:
        parent: pid of the calling process; a child exits with 1 if that has ended already.

    Returns:
        The function; None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the request was made: then no signal would ever come.
        if os.getppid() != parent:
            os._exit(1)

    return arrange


class Guardian:
    """Helper process that SIGKILLs the registered process groups once this process ends.

    The constructor starts it; `close` ends it too, and it then kills the groups that it still
    guards. If it is killed itself, the run continues without it.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def register(self, sign: str, group: int) -> None:
        """Guard (`+`) or forget (`-`) a process group."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(f"{sign}{group}\n".encode())
                self.process.stdin.flush()

    def close(self) -> None:
        """End the guardian: it kills the groups that it still guards."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def can_fork() -> bool:
    """Return whether this system forks safely and has pidfd_open: Linux from 5.3 on."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ForkServer:
    """The supervisor's end of `fork_server.py`.

    Attributes:
        modules: imported before the first fork.
        environ: of the server, so of every worker.
        folder: the run folder: logs/import.log gets the output of imports, phase.json their
            progress.
        ready: imports are done.
        cannot: why it forks nothing, or no more; "" while it may.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._use_channel(ours, environ)
        self._log = folder / "logs" / "import.log"
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launch.fork_server", str(theirs.fileno()),
                 ",".join(modules), str(folder.absolute())],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=make_parent_death_hook(os.getpid()),
            )  # fmt: skip
        self.pid = self._process.pid

    def _use_channel(self, channel: socket.socket, environ: Mapping[str, str]) -> None:
        self._channel, self.environ = channel, dict(environ)
        self.pid, self.ready, self.cannot = 0, False, ""
        self.codes: dict[int, int] = {}
        self._forked: list[dict[str, Any]] = []

    def open_channel(self) -> socket.socket:
        """Return a channel to a fork of the server, for the `JoinedForkServer` of a supervisor.

        The fork is made once the server's imports are done. It ends with the server, or once the
        channel is closed in all processes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # a supervisor finds the channel of no server
            socket.send_fds(self._channel, [b'{"serve": true}'], [theirs.fileno()])
        return ours

    def poll(self, wait_s: float = 0.0) -> None:
        """Process the server's messages; wait so long for one if there is none."""
        self._channel.settimeout(wait_s)
        while not self.cannot or self.ready:
            try:
                told = self._channel.recv(MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                told = b""
            self._channel.settimeout(0.0)
            if not told:
                self.ready, self.cannot = False, self.cannot or "it ended"
                return
            message = json.loads(told)
            if "ended" in message:
                self.codes[message["ended"]] = message["code"]
            elif "ready" in message:
                self.ready, self.pid = True, message.get("pid", self.pid)
            elif self.ready:
                self._forked.append(message)
            else:
                self.cannot = message["cannot"]

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: int,
        guard: Callable[[int], None],
    ) -> ForkedWorker:
        """Start `PYTHON -m MODULE ARGUMENT…` as a worker that writes to the open file `log`.

        Args:
            guard: called with the worker's pid before the worker runs, so that a kill of this
                process finds all that the worker will start.

        Raises:
            OSError: there is no worker after FORK_S.
        """
        place = {key: text for key, text in environ.items() if self.environ.get(key) != text}
        request = json.dumps({"command": list(command[2:]), "environ": place})
        until_s = time.monotonic() + FORK_S
        waits, goes = os.pipe()
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._channel, [request.encode()], [log, waits])
            while self.ready and not self._forked and time.monotonic() < until_s:
                self.poll(1.0)
            answer = self._forked.pop() if self._forked else {"cannot": self.cannot or "no answer"}
            if "pid" not in answer:
                raise OSError(f"forked from a process with all imports: {answer['cannot']}")
            pid = int(answer["pid"])
            guard(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(goes, b"1")
        finally:
            os.close(waits)
            os.close(goes)
        return ForkedWorker(pid, self)

    def close(self) -> None:
        """End the server, and with it every worker that it forked."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()


class JoinedForkServer(ForkServer):
    """The supervisor's end of a fork of a server that another process started.

    Args:
        channel: open file of the other process's `open_channel`.
        environ: that of the server.

    Attributes:
        pid: of the fork; 0 until it is ready.
    """

    def __init__(self, channel: int, environ: Mapping[str, str]) -> None:
        self._use_channel(socket.socket(fileno=channel), environ)
        self._channel.set_inheritable(False)

    def close(self) -> None:
        """Close the channel; the fork ends, and with it every worker that it forked."""
        self._channel.close()


class SharedForkServer:
    """Fork server of several supervisors, started at its first use, and anew if it was killed.

    Args:
        modules: imported once for all; empty: every supervisor imports for itself.
        guardian: guards the server.
    """

    def __init__(self, modules: Sequence[str], guardian: Guardian) -> None:
        self.modules, self.guardian = modules if can_fork() else (), guardian
        self._server: ForkServer | None = None

    def open_channel(self, environ: Mapping[str, str], folder: Path) -> socket.socket | None:
        """Return a channel for a supervisor; None if it starts its workers as programs.

        Args:
            environ: of the server, at its start; of all its workers.
            folder: gets logs/import.log and the progress of imports.
        """
        if self._server is not None:
            self._server.poll()
            if self._server.cannot:
                self.close()
        if self._server is None and self.modules:
            self._server = ForkServer(self.modules, environ, folder)
            self.guardian.register("+", self._server.pid)
        return self._server.open_channel() if self._server else None

    def close(self) -> None:
        """End the server, its forks and all their workers."""
        if self._server is not None:
            self._server.close()
            self.guardian.register("-", self._server.pid)
            self._server = None


class ForkedWorker:
    """Handle of a forked worker, with the part of `subprocess.Popen` that is needed."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    def poll(self) -> int | None:
        """Return its exit code, minus the signal that killed it, or None while it runs."""
        self._server.poll()
        # The kernel kills whatever a server forked when the server dies.
        gone = None if self._server.ready else -signal.SIGKILL
        return self._server.codes.get(self.pid, gone)

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._server.poll(0.05)
        return code


class Worker:
    """A started worker: forked by `server`, or a program of its own without a server.

    Attributes:
        code: None while it runs; then its exit code, or minus the signal that killed it.
        ended_s: time on the monotonic clock at which its end was noticed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        watched_by: Guardian,
        server: ForkServer | None = None,
    ) -> None:
        folder, self.rank = Path(environ["SHOAL_RUN_FOLDER"]), int(environ["RANK"])
        self.owner = FolderOwner(folder)
        self.guardian = watched_by
        self.code: int | None = None
        self.ended_s = 0.0
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)  # a user may have deleted it
            with self.log_path.open("ab") as log:
                with contextlib.suppress(OSError):  # a full disk must not stop a restart
                    log.write(_log_header(environ).encode())
                    log.flush()
                self.log_start = log.tell()
                self.process = (
                    server.fork(command, environ, log.fileno(), self._guard)
                    if server
                    else _start_program(command, environ, log)
                )
        except (OSError, subprocess.SubprocessError) as failure:
            raise ClusterError(
                f"rank {self.rank}: its process cannot be started: {command[0]}: {failure}"
            ) from failure
        self.pid = self.process.pid
        if not server:
            self._guard(self.pid)

    @property
    def log_path(self) -> Path:
        """Return the file of the worker's output, in the run folder's present place."""
        return self.owner.current_path() / "logs" / f"rank-{self.rank}.log"

    @property
    def error_path(self) -> Path:
        """Return the file of the error that ended the worker, in the run folder's present place."""
        return self.owner.current_path() / "logs" / f"rank-{self.rank}.error.json"

    def poll(self) -> int | None:
        """Return the exit code, if the worker has ended; kill its leftover children at once."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.ended_s = time.monotonic()
            if isinstance(self.process, subprocess.Popen):  # else the fork server does it
                # Now, while the kernel cannot have reused the group's number.
                self._signal_group(signal.SIGKILL)
            self.guardian.register("-", self.pid)
            self.code = code
        return self.code

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the worker alone: it ends its loader processes itself."""
        if self.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the worker and all processes that it started."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)

    def wait_killed(self) -> bool:
        """Wait for the end of a killed worker; return False if the kernel keeps it (stuck disk)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_WAIT_S)
        return self.poll() is not None

    def _guard(self, pid: int) -> None:
        self.guardian.register("+", pid)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _start_program(
    command: Sequence[str], environ: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a worker as a program, which imports for itself."""
    return subprocess.Popen(
        list(command),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=make_parent_death_hook(os.getpid()),
    )


def _log_header(environ: Mapping[str, str]) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    rank, size, attempt = environ["RANK"], environ["WORLD_SIZE"], environ["SHOAL_ATTEMPT"]
    return f"--- {clock} · rank {rank} of {size} · attempt {attempt} ---\n"
