"""Loader processes live as long as their trainer wants: a group's SIGTERM is not theirs."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from typing import Any

import pytest

from shoal.data.loading.worker_pool import follow_parent_signals


def obedient(ready: Any) -> None:
    follow_parent_signals()
    ready.set()
    time.sleep(30)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others name no sender")
def test_a_strangers_sigterm_is_ignored_and_the_parents_is_not() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=obedient, args=(ready,), daemon=True)
    process.start()
    assert ready.wait(10)
    for name in ("TERM", "INT"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    process.join(0.3)
    assert process.is_alive(), "its trainer saves, and needs it"
    process.terminate()
    process.join(10)
    assert process.exitcode == 0
