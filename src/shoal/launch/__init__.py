"""Launcher of a run on this machine: start its processes, restart them, leave none behind."""

from shoal.launch.supervisor import RunOutcome, State, supervise
from shoal.launch.worker_errors import run_and_exit, run_worker

__all__ = ["RunOutcome", "State", "run_and_exit", "run_worker", "supervise"]
