"""Crashes: a save is killed at every system call that matters, and a complete one always loads.

A forked child saves step 2 over steps 0 and 1 with `os` functions that count, and kills itself
(SIGKILL) just before or just after call number k, or in the middle of a write.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import Heard, alone, assert_same, save_step, state, wanted_all

from shoal.checkpoint.format.listing import list_checkpoints, verify
from shoal.checkpoint.load import read

CALLS = ("write", "fsync", "rename", "mkdir", "rmdir", "unlink")
DEADLINE_S = 20.0


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; gives its wait status. The child never returns to pytest."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the saving child did not end")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(DEADLINE_S)


def _count_calls(log: Path | None, kill_at: int, when: str) -> None:
    """Replace the calls by ones that are counted, and that kill this process at number kill_at."""
    seen = 0
    real: dict[str, Any] = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal seen
            seen += 1
            if log is not None:
                descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                real["write"](descriptor, f"{name}\n".encode())
                os.close(descriptor)
            if seen == kill_at and when == "before":
                _die()
            if seen == kill_at and when == "middle" and name == "write":
                real["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                _die()
            try:
                return real[name](*args, **more)
            finally:
                if seen == kill_at:
                    _die()

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))


@pytest.fixture
def before(tmp_path: Path) -> Path:
    root = tmp_path / "before"
    save_step(root, 0)
    save_step(root, 1)
    return root


def test_a_kill_at_any_point_leaves_a_complete_checkpoint(before: Path, tmp_path: Path) -> None:
    log, root = tmp_path / "calls", tmp_path / "checkpoints"

    def saving(kill_at: int, when: str, log: Path | None = None) -> int:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)

        def work() -> None:
            _count_calls(log, kill_at, when)
            save_step(root, 2, keep=2)

        return _in_child(work)

    assert saving(0, "never", log) == 0
    calls = log.read_text().split()
    assert {"write", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= set(calls)
    committed = len(calls) - calls[::-1].index("rename") - 1  # the last rename retires step-0
    steps = set()
    for kill_at in range(1, len(calls) + 1):
        for when in ("before", "middle"):
            assert os.WTERMSIG(saving(kill_at, when)) == signal.SIGKILL, (kill_at, when)
            heard = Heard()
            loaded = read.open_newest(root, wanted_all, alone(), heard)
            assert loaded is not None, (kill_at, calls[kill_at - 1], when)
            assert heard.events == [], (kill_at, calls[kill_at - 1], when)
            assert_same(loaded.tensors, state(loaded.step))
            assert loaded.step in ((1, 2) if kill_at <= committed else (2,)), (kill_at, when)
            steps.add(loaded.step)
            assert all(verify(found.path) == [] for found in list_checkpoints(root))
            assert not [name for name in os.listdir(root) if "tmp" in name]
            save_step(root, 2, keep=2)
            save_step(root, 3, keep=2)
            assert [found.step for found in list_checkpoints(root)] == [3, 2]
    assert steps == {1, 2}
    assert len(calls) >= 14


def test_bytes_are_durable_before_the_name_and_the_name_before_old_ones_go(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL keeps the page cache, a power cut does not: so the order of fsyncs is looked at."""
    order: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        order.append(f"fsync {name.partition('.tmp')[0]}")
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        order.append(f"rename {Path(source).name.partition('-')[2].partition('.')[0]}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_step(before, 2, keep=2)
    assert order == [
        "fsync rank-0.safetensors",
        "fsync manifest.json",
        "fsync step-2",
        "rename 2",
        "fsync before",
        "rename 0",
    ]
