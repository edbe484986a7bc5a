"""The lease on a run folder: a second run is refused by name, a killed owner followed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.base.errors import CheckpointError
from shoal.checkpoint.format import lease
from shoal.checkpoint.format.lease import RunLease, read_owner

OWNER = """
import sys, time
from pathlib import Path
from shoal.checkpoint.format.lease import RunLease
RunLease(Path(sys.argv[1]), "first").acquire()
sys.stdout.write("held\\n"); sys.stdout.flush()
time.sleep(30)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds tmp_path/runs/x."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "runs" / "x")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_living_owner_is_named_and_a_killed_one_followed(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    second = RunLease(tmp_path / "runs" / "x", "second")
    with pytest.raises(CheckpointError) as caught:
        second.acquire()
    since = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"runs/x: in use by pid {owner.pid} on host {re.escape(socket.gethostname())} since "
        rf"{since}; stop that run, or choose another run.name",
        str(caught.value),
    )
    assert caught.value.exit_code == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait(timeout=10)
    before = second.acquire()
    assert before is not None
    assert (before.pid, before.run) == (owner.pid, "first")
    assert before.has_ended
    now = read_owner(second.folder)
    assert now is not None
    assert (now.pid, now.run) == (os.getpid(), "second")
    assert not now.has_ended
    second.release()


def test_letting_go_leaves_nothing_to_take_over(tmp_path: Path) -> None:
    with RunLease(tmp_path, "a"), pytest.raises(CheckpointError, match="in use by pid"):
        RunLease(tmp_path, "b").acquire()
    third = RunLease(tmp_path, "c")
    assert third.acquire() is None
    third.release()
    third.release()
    assert read_owner(tmp_path) is None


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A loader worker that outlives its killed parent must not keep the folder."""
    held = RunLease(tmp_path, "parent")
    held.acquire()
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        time.sleep(0.1)
        with pytest.raises(CheckpointError):  # the child's letting go is not the parent's
            RunLease(tmp_path, "other").acquire()
        held.release()
        other = RunLease(tmp_path, "other")
        other.acquire()
        other.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_orphan_that_holds_the_lock_is_told_apart(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "runs" / "x"
    fields = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps({**fields, "born": fields["born"] - 1}))
    with pytest.raises(CheckpointError, match=r"pid \d+, which had it, has ended, but a process"):
        RunLease(folder, "x").acquire()
    (folder / "owner.json").write_text("{")
    with pytest.raises(CheckpointError, match="runs/x: in use by another process"):
        RunLease(folder, "x").acquire()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lease.fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=r"has no locks \(No locks available\); choose a run"):
        RunLease(tmp_path, "x").acquire()
