"""Exclusive lease on a run folder: a second process that wants to write there is refused.

    owner.lock   an empty file, locked (flock) by the owner while it lives
    owner.json   the owner: run, pid, host, start; for messages only

The kernel drops the lock when the owner ends, however it ends, so after SIGKILL the next process
takes the folder at once, without a timeout. A forked child releases its copy of the lock: it must
not keep the folder when its parent dies. Stdlib only: the supervisor uses it before torch is
loaded.

Limits: on network file systems flock works across hosts if the mount passes it on (NFS since
Linux 2.6.12, Lustre with `flock`); with a mount that keeps locks local, two hosts do not see each
other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.base.errors import CheckpointError
from shoal.base.runlog.folder_owner import OWNER_FILE, FolderOwner

LOCK_FILE = "owner.lock"


@dataclass(frozen=True)
class Owner:
    """The process that has, or had, a run folder.

    Attributes:
        started_s: when it took the folder, seconds since 1970.
        boot, born: boot id of its machine, and its start time in clock ticks since then: with the
            pid they name one process for ever, since pids are used again.
    """

    run: str
    pid: int
    host: str
    started_s: float
    boot: str
    born: int

    @staticmethod
    def this_process(run: str) -> Owner:
        """Return the calling process as an owner."""
        boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()
        return Owner(
            run,
            os.getpid(),
            socket.gethostname(),
            time.time(),
            boot,
            _read_start_ticks(os.getpid()),
        )

    @property
    def is_here(self) -> bool:
        """Return whether this process ran on this machine since it was started."""
        here = Owner.this_process("")
        # The host too: containers of one machine share the boot id and have pids of their own.
        return bool(here.boot) and (here.boot, here.host) == (self.boot, self.host)

    @property
    def has_ended(self) -> bool:
        """Return whether this process is known to have ended; False if that is unknown."""
        return self.is_here and _read_start_ticks(self.pid) != self.born

    def text(self) -> str:
        """Return the owner as messages name it."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))
        return f"pid {self.pid} on host {self.host} since {since}"


class RunLease:
    """Exclusive lock on one run folder, from `acquire` to `release`, or as long as `with` lasts.

    `acquire` makes the folder if it is missing. The kernel frees the lock when the process ends; a
    forked child does not hold it.

    Args:
        folder: the run's folder.
        run_id: this run's name, which `acquire` writes to owner.json.

    Raises:
        CheckpointError: from `acquire`: another process has the lock, or the file system has none.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self.owner = FolderOwner(folder)
        self._descriptor: int | None = None

    def acquire(self) -> Owner | None:
        """Lock the folder; return the previous owner if it ended without a release.

        Raises:
            CheckpointError: another process has it (or this one, by another lease), or the file
                system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            os.close(descriptor)
            raise CheckpointError(self._format_refusal()) from failure
        except OSError as failure:
            os.close(descriptor)
            raise CheckpointError(
                f"{self.folder}: this file system has no locks ({failure.strerror}); "
                f"choose a run.folder on another one"
            ) from failure
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self._unlock)
        before = read_owner(self.folder)
        self._write_owner()
        return before

    def check(self) -> None:
        """Refuse a folder that another process has, and leave its lock and owner as they are.

        For a message about the folder's content, which another process may be writing just now.

        Raises:
            CheckpointError: another process has it.
        """
        try:
            descriptor = os.open(self.folder / LOCK_FILE, os.O_RDONLY)
        except OSError:  # never locked, or not ours to read
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise CheckpointError(self._format_refusal()) from failure
        except OSError:
            return
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Unlock the folder; do nothing if it is not locked."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # the folder may have been moved or deleted
            (self.owner.current_path() / OWNER_FILE).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        # Closing the last copy unlocks; in a forked child the parent's copy keeps the lock.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_owner(self) -> None:
        half = self.folder / f"{OWNER_FILE}.tmp"
        half.write_text(
            json.dumps(asdict(Owner.this_process(self.run_id))) + "\n", encoding="utf-8"
        )
        os.replace(half, self.folder / OWNER_FILE)
        self.owner.record_with_owner()

    def _format_refusal(self) -> str:
        shown = "/".join(self.folder.parts[-2:])
        owner = read_owner(self.folder)
        if owner is None:
            return f"{shown}: in use by another process; wait for it, or choose another run.name"
        if owner.has_ended:
            return (
                f"{shown}: pid {owner.pid}, which had it, has ended, but a process that it started "
                f"still holds {LOCK_FILE}; stop that one (`fuser {shown}/{LOCK_FILE}` names it)"
            )
        return f"{shown}: in use by {owner.text()}; stop that run, or choose another run.name"

    def __enter__(self) -> RunLease:
        """Lock the folder."""
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock the folder."""
        self.release()


def read_owner(folder: Path) -> Owner | None:
    """Read the process that a folder's owner.json names, alive or not; None if damaged."""
    try:
        fields: dict[str, Any] = json.loads(_read(folder / OWNER_FILE))
        return Owner(**fields)
    except (ValueError, TypeError):
        return None


def _read_start_ticks(pid: int) -> int:
    """Return a process's start in ticks since boot, 0 for none (field 22 of proc(5) stat)."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    return int(stat.rpartition(")")[2].split()[19]) if stat else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
