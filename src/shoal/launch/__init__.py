"""Launcher of a run on this machine: start its processes, restart them, leave none behind.

Names load at first use: the watchdog of a user's own loop, which starts with every run, needs no
supervisor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.launch.supervisor import RunOutcome, State, supervise
    from shoal.launch.worker_errors import run_and_exit, run_worker

_HOMES = {
    "RunOutcome": "shoal.launch.supervisor",
    "State": "shoal.launch.supervisor",
    "run_and_exit": "shoal.launch.worker_errors",
    "run_worker": "shoal.launch.worker_errors",
    "supervise": "shoal.launch.supervisor",
}

__all__ = ["RunOutcome", "State", "run_and_exit", "run_worker", "supervise"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.launch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
