"""What `shoal launch slurm` writes, run by a real Slurm: two nodes, a warning, the queue again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli_run import lines
from real_slurm import Missing, Slurm

pytestmark = pytest.mark.proof
STEPS = 250
WORDS = [
    "data.source=synthetic", "model.dim=32", "model.layers=2", "model.heads=2", "train.batch=8",
    "train.micro_batch=2", f"train.steps={STEPS}", "precision.compute=fp32", "train.prove=off",
    "train.on=['slowly:Slowly']",
]  # fmt: skip
SLOWLY = """
import time
from pathlib import Path

class Slowly:
    def __init__(self, folder):
        pass

    def __call__(self, event):
        if "loss" in event and not Path("fast").exists():
            time.sleep(0.5)
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """A Slurm of two nodes; where there is none the test is skipped, aloud."""
    (tmp_path / "slurm").mkdir()
    try:
        cluster = Slurm(tmp_path / "slurm")
    except Missing as why:
        warnings.warn(f"a real Slurm NOT TESTED: {why}", stacklevel=2)
        pytest.skip(str(why))
    yield cluster
    cluster.close()


def weights(run: Path) -> dict[str, str]:
    """The digest of each file of a run's last checkpoint but its manifest, which holds times."""
    step = run / "checkpoints" / f"step-{STEPS}"
    files = sorted(step.glob("*.safetensors"))
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_job_is_warned_saves_is_queued_again_and_ends_bit_equal(
    slurm: Slurm, tmp_path: Path
) -> None:
    shoal = str(Path(sys.executable).parent / "shoal")
    (tmp_path / "slowly.py").write_text(SLOWLY)
    environment = {
        **slurm.environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",  # n1 is the name of no machine
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def submit(*more: str) -> str:
        size = ["--nodes", "2", "--cpus", "1", "--grace", "30"]
        command = [shoal, "launch", "slurm", *WORDS, *more, *size]
        job = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout
        (tmp_path / "job.sh").write_text(job)
        told = subprocess.run(
            ["sbatch", "job.sh"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return told.split()[-1]

    def state(job: str) -> dict[str, str]:
        words = slurm.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def told(job: str) -> str:
        logs = [path.read_text() for path in tmp_path.glob(f"*-{job}.log")]
        return f"{state(job)}\n{logs}\n{slurm.said()}"

    def wait_for(what: Callable[[], bool], limit_s: float, job: str) -> None:
        until_s = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < until_s, told(job)
            time.sleep(0.5)

    job = submit("--hours", "0.04")  # Slurm counts whole minutes: two
    run = tmp_path / "runs" / f"job-{job}"
    wait_for(
        lambda: (run / "metrics.jsonl").exists() and len(lines(run / "metrics.jsonl")) > 5, 90, job
    )
    wait_for(lambda: state(job)["Restarts"] == "1", 150, job)  # 30 s before the end, or earlier
    (tmp_path / "fast").touch()
    kept = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert kept, told(job)
    # Slurm holds what was queued again back for a while, so that a job that fails cannot spin.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: state(job)["JobState"] in ("COMPLETED", "FAILED"), 180, job)
    assert state(job)["JobState"] == "COMPLETED", told(job)
    events = lines(run / "events.jsonl")
    assert [one["resumed"] for one in events if one["event"] == "run_started"] == [False, True]
    stopped = [one["how"] for one in events if one["event"] == "run_finished"]
    assert stopped[0] == "stopped on request"
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert not slurm.ask("squeue", "-h")

    whole = submit("run.name=whole", "train.on=[]")
    wait_for(lambda: state(whole)["JobState"] in ("COMPLETED", "FAILED"), 120, whole)
    assert state(whole)["JobState"] == "COMPLETED", told(whole)
    assert weights(tmp_path / "runs" / "whole") == weights(run)
