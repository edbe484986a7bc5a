"""A group ends when gloo's threads are at rest, not while one of them still needs Python's lock."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from shoal.fabric import world
from shoal.fabric.world import wait_for_idle_threads


def test_a_thread_in_the_middle_of_something_is_waited_for() -> None:
    """It is one of Python's here, with the name that torch gives gloo's."""
    ends, begun = threading.Event(), threading.Event()
    ended_s = []

    def works() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            pass  # it runs, or sleeps until it has Python's lock
        ended_s.append(time.monotonic())
        ends.wait()

    thread = threading.Thread(target=works)
    thread.start()
    begun.wait()
    wait_for_idle_threads()
    rested_s = time.monotonic()
    ends.set()
    thread.join()
    assert ended_s
    assert rested_s >= ended_s[0]


def test_without_such_threads_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process of its own, so to speak: others' tests leave threads of gloo in this one."""
    task = tmp_path / "1"
    task.mkdir()
    (task / "comm").write_text("python\n")
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    wait_for_idle_threads(tmp_path)
    assert waits == []
    (task / "comm").write_text("pt_gloo_runloop\n")
    (task / "status").write_text("State:\tS (sleeping)\nvoluntary_ctxt_switches:\t3\n")
    wait_for_idle_threads(tmp_path)
    assert waits == [world.LOOK_S], "one look later it has not moved"
