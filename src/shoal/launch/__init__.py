"""Starts the processes of a run on this machine, restarts them, leaves none behind."""

from shoal.launch.supervisor import Outcome, State, supervise
from shoal.launch.worker_errors import end_with, run_worker

__all__ = ["Outcome", "State", "end_with", "run_worker", "supervise"]
