"""The same command under other people's launchers: torchrun and Slurm's environment variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli_run import TOY, lines
from forks import shared

ARGUMENTS = [
    "model.build=toy:build", "data.source=toy:data", "train.batch=16", "train.micro_batch=2",
    "train.steps=4", "precision.compute=fp32",
]  # fmt: skip


SMALL = [
    "data.source=synthetic", "model.dim=32", "model.layers=2", "model.heads=2", "train.batch=16",
    "train.micro_batch=2", "train.steps=4", "precision.compute=fp32",
]  # fmt: skip
"""Nothing of the user's own, for whose sake Python would look into the working folder."""


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "toy.py").write_text(TOY)
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def under_torchrun(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Two processes, which must end well; all of them are forks (as_program.py)."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = shared().run(*launcher, *command, cwd=tmp_path, environ=environment(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_under_torchrun(tmp_path: Path) -> None:
    """By the installed script, whose modules of the user's own Python does not find by itself."""
    script = str(Path(sys.executable).parent / "shoal")
    (tmp_path / "mine.py").write_text("import torch\n\nclass Steps(torch.optim.SGD):\n    pass\n")
    words = ("train", *SMALL, "run.name=run", "optimizer.name=mine:Steps")
    done = under_torchrun(tmp_path, "--no-python", script, *words)
    assert done.stdout.count("completed at step 4") == 1, "rank 0 alone speaks"
    assert len(lines(tmp_path / "runs" / "run" / "metrics.jsonl")) == 4
    events = lines(tmp_path / "runs" / "run" / "events.jsonl")
    started = {e["rank"]: e["pid"] for e in events if e["event"] == "worker_started"}
    assert sorted(started) == [0, 1]
    assert len(set(started.values())) == 2
    ranks = json.loads((tmp_path / "runs" / "run" / "ranks.json").read_text())["ranks"]
    assert [(one["rank"], one["local_rank"], one["pid"]) for one in ranks] == [
        (0, 0, started[0]),
        (1, 1, started[1]),
    ]
    about = {(one["host"], one["device"], one["device_name"]) for one in ranks}
    assert about == {(socket.gethostname(), "cpu", "")}


@pytest.mark.proof
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
        outputs = [p.communicate(timeout=300)[0] for p in processes]
        return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]

    answers = start(*ARGUMENTS, "run.name=run")
    assert [code for code, _ in answers] == [0, 0], answers
    assert "completed at step 4" in answers[0][1]
    assert answers[1][1].strip() == ""
    answers = start(*ARGUMENTS, "train.batch=7")
    assert [code for code, _ in answers] == [2, 2]
    said = [text for _, text in answers if "try: train.batch=8" in text]
    assert len(said) == 1, answers


CRASHES_ONCE = '''
import os
from pathlib import Path
import toy

def first(event):
    """A hook that ends rank 1 at its first step, once."""
    mark = Path("crashed")
    if "loss" in event and not mark.exists():
        mark.touch()
        os._exit(1)
'''


@pytest.mark.proof
def test_a_restart_by_torchrun_before_the_first_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(CRASHES_ONCE)
    (tmp_path / "run.toml").write_text('[run]\nname = "run"\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "--max-restarts=1", "-m", "shoal", "train", "run.toml", *ARGUMENTS,
         "train.on=['once:first']"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    started = [e for e in lines(run / "events.jsonl") if e["event"] == "worker_started"]
    assert [e["attempt"] for e in started] == [0, 0, 1, 1]


@pytest.mark.proof  # the line: tests/cli/test_user_code.py; no restart: test_faults.py
def test_a_builder_that_the_module_lacks_is_one_line(tmp_path: Path) -> None:
    """It is found only by importing, so the workers find it: no restart, status 2."""
    from cli_run import CommandLine

    command = CommandLine(tmp_path, *ARGUMENTS, "model.build=json:laods")
    code, output = command.finish()
    assert code == 2, output
    said = [line for line in output.splitlines() if line.startswith("shoal: ")]
    assert said == ["shoal: model.build = json:laods: json has no laods; try: json:loads"]
    assert "Traceback" not in output
    assert not command.events("restarting")


ADOPTED = """
import torch, torch.distributed as dist
import shoal
from shoal.models.catalog import build
from shoal.parallel.build import shared_build

shared_build.LEAST_BYTES = 0
dist.init_process_group("gloo")
made = []

def make():
    made.append(torch.get_default_device().type)
    return build("gpt", {"dim": 32, "layers": 2}, vocabulary=32, sequence=16)

run = shoal.parallelize(make, lambda p: torch.optim.SGD(p, 0.1), layout="fsdp", batch=8, micro_batch=2)
tokens = torch.arange(8 * 16).view(8, 16) % 32
losses = [run.step(batch).loss for batch in run.loader([(row, (row + 1) % 32) for row in tokens])]
told = run.world.gather_json([made, losses])
if run.world.is_first:
    print(told)
run.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_that_was_there_before_builds_once_per_machine_too(worlds) -> None:
    """Ranks wait for the one that builds at the group's own store, whose waits may take long."""
    first, second = worlds(2).call("adopted_case:built")
    assert first[0] == ["cpu"]
    assert second[0] == ["meta"]
    assert first[1] == second[1]
    assert first[2:] == second[2:] == ["an existing process group", True]


@pytest.mark.proof
def test_a_group_that_the_script_made_builds_once_per_machine_too(tmp_path: Path) -> None:
    """Ranks wait for the one that builds at the group's own store, whose waits may take long."""
    (tmp_path / "script.py").write_text(ADOPTED)
    done = under_torchrun(tmp_path, "script.py")
    told = [line for line in done.stdout.splitlines() if line.startswith("[[['cpu']")]
    assert len(told) == 1, done.stdout
    assert "[['meta']" in told[0]


@pytest.mark.proof  # what a starter does: tests/launch/test_jobs.py; the store: test_attacked.py
def test_two_nodes_by_our_own_starter_with_a_token_and_again(tmp_path: Path) -> None:
    """As Kubernetes and ssh start them: one starter per node; at a restart the run is resumed."""
    from shoal.launch.processes import free_port

    def start(steps: int, attempt: int) -> list[tuple[int, str]]:
        meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        meets |= {
            "SHOAL_TOKEN": "of this test's two nodes",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        train = [sys.executable, "-m", "shoal", "train", *SMALL, "run.name=run"]
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "shoal.launch.node", "--nodes", "2", "--node", str(node),
                 "--processes", "1", "--", *train, f"train.steps={steps}"],
                cwd=tmp_path,
                env=environment(tmp_path, **meets),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]  # fmt: skip
        said = [node.communicate(timeout=300)[0] for node in nodes]
        return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]

    first, second = start(4, 0)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "completed at step 4" in first[1]
    assert "has no token" not in first[1]
    first, second = start(8, 1)
    assert (first[0], second[0]) == (0, 0), (first, second)
    rows = lines(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
