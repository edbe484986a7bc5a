"""Launcher of a run on this machine: start its processes, restart them, leave none behind."""

from shoal.launch.supervisor import Outcome, State, supervise
from shoal.launch.worker_errors import end_with, run_worker

__all__ = ["Outcome", "State", "end_with", "run_worker", "supervise"]
