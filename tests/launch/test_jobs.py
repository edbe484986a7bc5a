"""What `shoal launch` writes: texts that shells and YAML readers take, and the starter of a node."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.errors import ConfigError, ShoalError
from shoal.cli.main import app
from shoal.launch import jobs
from shoal.launch.jobs import Job

yaml = pytest.importorskip("yaml")
JOB = Job(("run.toml", "run.name=a run"), "night", nodes=2, processes=4, gpus=4, grace_s=90)


def read_by_bash(text: str, tmp_path: Path) -> None:
    """bash reads it to the end without running it."""
    path = tmp_path / "script.sh"
    path.write_text(text)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_batch_script_warns_requeues_and_keeps_its_token(tmp_path: Path) -> None:
    text = jobs.make_slurm_script(JOB, hours=1.5, cpus=8)
    read_by_bash(text, tmp_path)
    options = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "SBATCH" in line]
    assert options == [
        "job-name=night", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8",
        "time=1:30:00", "signal=USR1@90", "output=night-%j.log", "open-mode=append", "requeue",
    ]  # fmt: skip
    assert (
        "srun --kill-on-bad-exit=1 shoal train run.toml 'run.name=a run' launch.grace_s=80" in text
    )
    assert "gpus" not in jobs.make_slurm_script(Job(("run.toml",)), hours=1, cpus=1)


SLURM = """#!/bin/bash
case $0 in
*/srun) echo "$SHOAL_TOKEN" > token; echo "$@" > asked; exit ${CODE} ;;
*/scontrol) echo "$@" > again ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, False), (2, False), (138, True), (143, True)]
)
def test_the_script_goes_back_to_the_queue_after_a_save_only(
    tmp_path: Path, code: int, again: bool
) -> None:
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(jobs.make_slurm_script(JOB, hours=1, cpus=1))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
    environ["SLURM_JOB_ID"] = "77"
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environ, timeout=120, check=False)
    assert done.returncode == code
    assert len((tmp_path / "token").read_text().strip()) == 64
    assert (tmp_path / "again").exists() == again
    if again:
        assert (tmp_path / "again").read_text() == "requeue 77\n"


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_documents_are_read_as_they_were_meant(kind: str) -> None:
    documents = jobs.make_kubernetes_documents(
        JOB, kind=kind, image="me/shoal:1", claim="disk", token="yes"
    )
    text = "".join(f"---\n{jobs.to_yaml(one)}\n" for one in documents)
    assert list(yaml.safe_load_all(text)) == documents
    secret, job = documents
    assert secret["stringData"] == {"token": "yes"}
    assert "yes" not in json.dumps(job), "the token is in the secret alone"
    spec = job["spec"]
    if kind == "jobset":
        (node,) = spec["replicatedJobs"]
        inner = node["template"]["spec"]
        assert (inner["parallelism"], inner["completions"]) == (2, 2)
        pod = inner["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 90
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        assert "livenessProbe" in container
        command, volumes, mounts = container["command"], pod["volumes"], container["volumeMounts"]
        assert '--node "$JOB_COMPLETION_INDEX"' in command[2]
        assert 'MASTER_ADDR="night-node-0-0.night"' in command[2]
    else:
        command = spec["trainer"]["command"]
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 4)
        assert '--node "$PET_NODE_RANK"' in command[2]
        (patch,) = spec["runtimePatches"]
        (pods,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = pods["template"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 90
        volumes, mounts = pod["volumes"], pod["containers"][0]["volumeMounts"]
    assert command[:2] == ["sh", "-c"]
    assert subprocess.run(["sh", "-n", "-c", command[2]], check=False).returncode == 0
    assert {one["name"] for one in mounts} == {one["name"] for one in volumes}
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "disk"}} in volumes


ODD = [
    "yes",
    "no",
    "1",
    "a: b",
    "- x",
    "#c",
    "",
    " ",
    "a#b",
    "ü",
    "line\nline",
    "NULL",
    "~",
    "{}",
    "a:",
]


def test_odd_texts_survive_yaml() -> None:
    value = {"texts": ODD, "empty": {}, "none": [], "nested": [{"a": [1, {"b": True}]}], "n": None}
    assert yaml.safe_load(jobs.to_yaml(value)) == value


def test_a_hostfile_is_read_and_its_slips_are_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nuser@a slots=2\n\nb\n")
    assert jobs.read_hostfile(path) == [("user@a", 2), ("b", 0)]
    for text, said in (("a slots=x", "line 1"), ("\n-oProxyCommand=x", "line 2"), ("#", "no host")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            jobs.read_hostfile(path)


def test_a_layout_for_another_number_of_processes_is_told_before_the_queue(tmp_path: Path) -> None:
    """Also a key that does not exist, and a list of hosts that does not: no job is written."""
    for words, line in (
        (
            ["slurm", "layout.tp=3", "--nodes", "2", "--processes", "2"],
            "layout: tp 3 = 3 processes, but launch.processes = 4; try: layout.tp=2 ",
        ),
        (["slurm", "layout.strateg=ddp"], "layout.strateg: no such key; try: layout.strategy"),
        (
            ["ssh", "--hosts", str(tmp_path / "none")],
            f"--hosts {tmp_path}/none: No such file or directory; it has a line `HOST slots=N`",
        ),
    ):
        told = CliRunner().invoke(app, ["launch", *words])
        assert told.output == ""
        assert isinstance(told.exception, ShoalError)
        assert line in str(told.exception)
        assert told.exception.exit_code == 2


def test_over_ssh_no_list_of_processes_shows_the_token(tmp_path: Path) -> None:
    text = jobs.make_ssh_script(JOB, ["u@first", "second"], "/data/my folder")
    read_by_bash(text, tmp_path)
    first, second = jobs.make_ssh_commands(JOB, ["u@first", "second"], "/data/my folder")
    assert first[:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "u@first"]
    for number, command in enumerate((first, second)):
        assert "cd '/data/my folder' && exec env MASTER_ADDR=first" in command[-1]
        words = shlex.split(command[-1])
        assert words[words.index("--node") + 1] == str(number)
        assert "TOKEN" not in command[-1]


def test_over_ssh_ranks_run_by_this_python(tmp_path: Path) -> None:
    """A shell that ssh starts has no environment activated: a bare `python` would not find us."""
    hosts = tmp_path / "hosts"
    hosts.write_text("first\nsecond\n")
    for more, python in (([], sys.executable), (["--python", "/opt/py 3"], "/opt/py 3")):
        told = CliRunner().invoke(app, ["launch", "ssh", "--hosts", str(hosts), *more])
        assert told.exit_code == 0, told.output
        commands = [one for one in told.output.splitlines() if "shoal.launch.node" in one]
        assert len(commands) == 2
        for command in commands:
            words = shlex.split(shlex.split(command)[-2])  # the last one is &
            place = words.index("shoal.launch.node")
            assert words[place - 2 : place] == [python, "-m"]
            assert words[words.index("--") + 1 :][:4] == [python, "-m", "shoal", "train"]


CLIENT = """#!/bin/sh
echo "$0 $*" >> asked
if [ "${0##*/}" = ssh ]; then head -n 1 >> tokens; else cat > given; fi
exit ${CODE:-0}
"""
SUBMITTED = {
    "sbatch": ["slurm", "train.steps=3"],
    "kubectl": ["kubernetes", "train.steps=3", "--image", "me/shoal:1"],
    "ssh": ["ssh", "--hosts", "hosts"],
}


@pytest.mark.parametrize("client", SUBMITTED)
def test_a_job_is_handed_to_the_client_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """What is printed otherwise is given; its refusal is told; where there is none a line says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("first\nsecond\n")
    words = ["launch", *SUBMITTED[client], "--submit"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    told = CliRunner().invoke(app, words)
    assert isinstance(told.exception, ShoalError)
    assert f"--submit: there is no {client} here" in str(told.exception)
    (tmp_path / client).write_text(CLIENT)
    (tmp_path / client).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for code in (0, 3):
        monkeypatch.setenv("CODE", str(code))
        told = CliRunner().invoke(app, words)
        if client == "ssh":
            assert told.exit_code == code
            continue
        assert (told.exit_code == 0) == (code == 0)
        if code:
            assert str(told.exception) == f"--submit: {client} ended with status 3"
    asked = (tmp_path / "asked").read_text()
    if client == "ssh":
        tokens = (tmp_path / "tokens").read_text().split()
        assert len(tokens) == 4
        assert (tokens[0] == tokens[1], tokens[1] == tokens[2]) == (True, False), "one per run"
        assert not any(one in asked for one in tokens), "in no list of processes"
        return
    given = (tmp_path / "given").read_text()
    if client == "sbatch":
        printed = CliRunner().invoke(app, words[:-1]).output
        assert given == printed
    else:
        assert [one["kind"] for one in yaml.safe_load_all(given)] == ["Secret", "JobSet"]
        assert asked.splitlines()[0].endswith("kubectl apply -f -")


RANK = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def stop(number, frame):
    Path(f"stopped-{rank}").write_text(str(number))
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
told = [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
Path(f"began-{rank}.tmp").write_text(" ".join([*told, os.environ.get("SHOAL_TOKEN", "")]))
Path(f"began-{rank}.tmp").rename(f"began-{rank}")
if rank == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def node(folder: Path, *words: str, fails: str = "none 0") -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "shoal.launch.node", "--nodes", "2", "--node", "1"]
    command += ["--processes", "2", *words, "--", sys.executable, "rank.py", *fails.split()]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, text=True)


def await_files(folder: Path, *names: str) -> None:
    until_s = time.monotonic() + 20
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until_s, sorted(path.name for path in folder.iterdir())
        time.sleep(0.02)


def test_a_nodes_ranks_are_told_their_place_and_stop_with_it(tmp_path: Path) -> None:
    started = node(tmp_path, "--alive", str(tmp_path / "alive"))
    await_files(tmp_path, "began-2", "began-3", "alive")
    assert (tmp_path / "began-3").read_text().split() == ["3", "4", "1", "2"]
    started.send_signal(signal.SIGUSR1)
    assert started.wait(20) == 143
    for rank in (2, 3):
        assert (tmp_path / f"stopped-{rank}").read_text() == str(int(signal.SIGUSR1))


def test_one_that_fails_ends_the_node_with_its_status(tmp_path: Path) -> None:
    started = node(tmp_path, fails="3 2")
    assert started.wait(20) == 2
    await_files(tmp_path, "began-3")


def test_the_token_comes_by_the_input_and_its_end_is_a_stop(tmp_path: Path) -> None:
    started = node(tmp_path, "--stdin")
    assert started.stdin is not None
    started.stdin.write("a token of 16 letters and more\n")
    started.stdin.flush()
    await_files(tmp_path, "began-2", "began-3")
    assert (tmp_path / "began-2").read_text().endswith("a token of 16 letters and more")
    started.stdin.close()
    assert started.wait(20) == 143
    assert (tmp_path / "stopped-2").read_text() == str(int(signal.SIGTERM))
