"""A Slurm job of one task: its folder, its processes, its requeue, and what salloc leaves behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.base.slurm import INTERACTIVE_STEP, count_tasks
from shoal.cli.job_file import write_job_name
from shoal.cli.torchrun import continue_single_task_job
from shoal.launch import jobs
from shoal.launch.jobs import Job

WORDS = ["run.name=job-77", "launch.processes=1"]
REQUEUED = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}


def srun_line(job: Job) -> str:
    text = jobs.make_slurm_script(job, hours=1, cpus=1)
    return next(line for line in text.splitlines() if line.startswith("srun"))


def test_one_task_says_its_folder_and_its_processes() -> None:
    assert srun_line(Job(("run.toml",))).endswith('"run.name=job-$SLURM_JOB_ID" launch.processes=1')
    given = Job(("run.name=mine",), said=frozenset({"run.name", "launch.processes"}))
    assert "job-$" not in srun_line(given)
    assert "launch.processes" not in srun_line(given)
    for several in (Job(("run.toml",), processes=2), Job(("run.toml",), nodes=2)):
        assert "run.name" not in srun_line(several), "ranks name the folder themselves"


@pytest.mark.parametrize(
    ("array", "again"),
    [({}, "77"), ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "70_3")],
)
def test_a_task_of_an_array_is_put_back_alone(
    tmp_path: Path, array: dict[str, str], again: str
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 138\n")
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" > again\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    text = jobs.make_slurm_script(Job(("run.toml",)), hours=1, cpus=1)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "77", **array}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, timeout=120, check=False)
    assert done.returncode == 138
    assert (tmp_path / "again").read_text() == f"requeue {again}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of job 77 with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    step = Path("runs/job-77/checkpoints/step-3")
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    write_job_name(Path("runs/job-77"), REQUEUED)
    return Path("runs/job-77")


def test_a_requeued_job_finds_its_run(folder: Path) -> None:
    assert continue_single_task_job(WORDS, None, REQUEUED) == (WORDS, folder)


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (WORDS, {}),
        (WORDS, {"SLURM_JOB_ID": "77"}),  # a second run in the same allocation
        (WORDS, {**REQUEUED, "SLURM_JOB_ID": "78"}),
        (["launch.processes=1"], REQUEUED),
        (["run.name=other"], REQUEUED),
    ],
)
def test_others_begin_anew(folder: Path, words: list[str], environ: dict[str, str]) -> None:
    assert continue_single_task_job(words, None, environ) == (words, None)


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({}, ""),
        ({"SLURM_NTASKS": "4"}, ""),  # a shell of salloc
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": INTERACTIVE_STEP}, ""),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "1"}, ""),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "1"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, "4"),
    ],
)
def test_who_is_a_task(env: dict[str, str], tasks: str) -> None:
    assert count_tasks(env) == tasks
