"""The same command under other people's launchers: torchrun and Slurm's environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_run import TOY, lines

ARGUMENTS = [
    "model.build=toy:build", "data.source=toy:data", "train.batch=16", "train.micro_batch=2",
    "train.steps=4", "precision.compute=fp32",
]  # fmt: skip


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "toy.py").write_text(TOY)
    return {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **more}


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "shoal", "train", *ARGUMENTS, "run.name=run"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("completed at step 4") == 1, "rank 0 alone speaks"
    assert len(lines(tmp_path / "runs" / "run" / "metrics.jsonl")) == 4


def test_under_slurm_and_a_mistake_is_told_once(tmp_path: Path) -> None:
    def start(*arguments: str) -> list[tuple[int, str]]:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "shoal", "train", *arguments],
                cwd=tmp_path,
                env=environment(
                    tmp_path,
                    SLURM_PROCID=str(rank),
                    SLURM_NTASKS="2",
                    SLURM_LOCALID=str(rank),
                    SLURM_JOB_ID=str(4000 + os.getpid() % 10000),
                    SLURM_JOB_NODELIST="127.0.0.1",
                    SLURM_NTASKS_PER_NODE="2",
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [p.communicate(timeout=90)[0] for p in processes]
        return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]

    answers = start(*ARGUMENTS, "run.name=run")
    assert [code for code, _ in answers] == [0, 0], answers
    assert "completed at step 4" in answers[0][1]
    assert answers[1][1].strip() == ""
    answers = start(*ARGUMENTS, "train.batch=7")
    assert [code for code, _ in answers] == [2, 2]
    said = [text for _, text in answers if "nearest legal: train.batch=8" in text]
    assert len(said) == 1, answers
