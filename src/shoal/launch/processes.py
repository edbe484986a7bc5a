"""One worker process: how it is started, and how it and all it started are ended.

A worker is told its place by environment variables (read by `fabric/place.py`):
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE   as torchrun names them
  SHOAL_STORE_PORT, SHOAL_STORE_FD                 where the ranks meet; rank 0 gets the socket
  SHOAL_ATTEMPT, SHOAL_RUN_FOLDER                  how many restarts came before; where to report

Nothing survives the run: each worker leads its own session, so one signal to its process group
reaches its loader processes too; the kernel kills it when the supervisor dies (parent-death signal,
prctl(2)); `guardian.py` then kills what it had started. The store's socket is bound to loopback
before anyone else can claim the port; torch alone would listen on all interfaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.base.errors import ClusterError
from shoal.base.facts import usable_cores
from shoal.base.systems import loopback
from shoal.launch import guardian

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
KILL_WAIT_S = 10.0


def private_socket() -> socket.socket:
    """A listening socket on a fresh port that only this machine can reach."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    return listener


def worker_environment(
    base: Mapping[str, str],
    *,
    rank: int,
    processes: int,
    attempt: int,
    folder: Path,
    listener: socket.socket,
) -> dict[str, str]:
    """The environment of one worker: the caller's, with its place and polite defaults added.

    >>> listener = private_socket()
    >>> found = worker_environment({"OMP_NUM_THREADS": "7"}, rank=1, processes=2, attempt=0,
    ...                            folder=Path("/run"), listener=listener)
    >>> listener.close()
    >>> found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"], "SHOAL_STORE_FD" in found
    ('1', '2', '7', False)
    """
    # Without a limit every rank would start one thread per core and all would wait for each other.
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        "GLOO_SOCKET_IFNAME": loopback(),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its own stack traces would hide the line that counts
        "PYTHONFAULTHANDLER": "1",
    }
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "SHOAL_STORE_PORT": str(listener.getsockname()[1]),
        "SHOAL_ATTEMPT": str(attempt),
        "SHOAL_RUN_FOLDER": str(folder.absolute()),
    }
    if rank == 0:
        place["SHOAL_STORE_FD"] = str(listener.fileno())
    inherited = {key: value for key, value in base.items() if key != "SHOAL_STORE_FD"}
    return {**defaults, **inherited, **place}


def die_with(parent: int) -> Callable[[], None] | None:
    """What a child runs between fork and exec so that it dies when `parent` does."""
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
    """The supervisor's end of `guardian.py`; without it (it was killed) the run goes on."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, sign: str, group: int) -> None:
        """Guard (`+`) or forget (`-`) a process group."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(f"{sign}{group}\n".encode())
                self.process.stdin.flush()

    def close(self) -> None:
        """Let it finish: whatever it still guards is killed."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Worker:
    """One started worker.

    code      None while it runs; then its exit code, or minus the signal that killed it
    ended_s   wall-clock time at which its end was noticed
    """

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], watched_by: Guardian
    ) -> None:
        folder, self.rank = Path(environ["SHOAL_RUN_FOLDER"]), int(environ["RANK"])
        self.log_path = folder / "logs" / f"rank-{self.rank}.log"
        self.error_path = folder / "logs" / f"rank-{self.rank}.error.json"
        self.guardian = watched_by
        self.code: int | None = None
        self.ended_s = 0.0
        descriptor = int(environ.get("SHOAL_STORE_FD", "-1"))
        try:
            with self.log_path.open("ab") as log:
                with contextlib.suppress(OSError):  # a full disk must not stop a restart
                    log.write(_log_header(environ).encode())
                    log.flush()
                self.log_start = log.tell()
                self.process = subprocess.Popen(
                    list(command),
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=() if descriptor < 0 else (descriptor,),
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid()),
                )
        except (OSError, subprocess.SubprocessError) as failure:
            raise ClusterError(
                f"rank {self.rank}: its process cannot be started: {command[0]}: {failure}"
            ) from failure
        self.pid = self.process.pid
        self.guardian.tell("+", self.pid)

    def look(self) -> int | None:
        """Notice whether it ended; what it started and left behind is killed at once."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.ended_s = time.time()
            # Now, while the group's number cannot have been given to a stranger.
            self._signal_group(signal.SIGKILL)
            self.guardian.tell("-", self.pid)
            self.code = code
        return self.code

    def ask_to_stop(self) -> None:
        """SIGTERM to the worker alone: its loader processes are its own business."""
        if self.look() is None:
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to the worker and all it started."""
        if self.look() is None:
            self._signal_group(signal.SIGKILL)

    def wait_killed(self) -> bool:
        """Wait for a killed worker to be gone; False if the kernel holds on to it (stuck disk)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_WAIT_S)
        return self.look() is not None

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _log_header(environ: Mapping[str, str]) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    rank, size, attempt = environ["RANK"], environ["WORLD_SIZE"], environ["SHOAL_ATTEMPT"]
    return f"--- {clock} · rank {rank} of {size} · attempt {attempt} ---\n"
