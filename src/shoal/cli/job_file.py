"""Find the launcher's job of a process, and the job that last wrote into a run folder.

RUN/logs/job                                             the job's name, as the launcher has it
SLURM_JOB_ID, TORCHELASTIC_RUN_ID                        where it stands
SLURM_RESTART_COUNT, TORCHELASTIC_RESTART_COUNT          number of restarts of the job
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

JOB_FILE = "logs/job"
"""File in a run folder: the launcher's name of the job that last wrote there."""


def job_attempt(environ: Mapping[str, str]) -> int:
    """Return how many times the launcher restarted this job, the maximum of Slurm's and torchrun's.

    >>> job_attempt({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "2"})
    2
    """
    counts = [environ.get(f"{name}_RESTART_COUNT", "") for name in ("TORCHELASTIC", "SLURM")]
    return max(int(count) if count.isdigit() else 0 for count in counts)


def job_name(environ: Mapping[str, str]) -> str:
    """Return the launcher's own name for the job; "" if it has none.

    >>> job_name({"SLURM_JOB_ID": "77"}), job_name({"TORCHELASTIC_RUN_ID": "none"})
    ('77', '')
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if job == "none" else job


def write_job_name(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the job's name into a run folder; nothing if the job has no name."""
    if job := job_name(environ):
        (folder / JOB_FILE).parent.mkdir(exist_ok=True)
        (folder / JOB_FILE).write_text(job, encoding="utf-8")


def belongs_to_job(folder: Path, job: str) -> bool:
    """Return whether a run folder was last written by this very job."""
    try:
        return bool(job) and (folder / JOB_FILE).read_text(encoding="utf-8") == job
    except OSError:
        return False
