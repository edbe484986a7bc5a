"""`shoal launch`: write the job of a run for Slurm, Kubernetes or ssh.

The command prints the job so that the user can read, change and keep it; `--submit` passes it to
the client instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import typer

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.estimates.facts import read_machine_facts
from shoal.cli.words import split_arguments
from shoal.config.load import load_config
from shoal.config.resolve import collect_layout_keys, make_plan
from shoal.launch import jobs
from shoal.launch.jobs import Job
from shoal.planning.settle import settle_layout
from shoal.wire.run_token import TOKEN, new_token, read_token

app = typer.Typer(
    help="Write the job of a run for a cluster, or hand it over (docs/start/cluster.md).",
    no_args_is_help=True,
)
ARGUMENTS = typer.Argument(None, metavar="RUN.TOML|SECTION.KEY=VALUE", help="As for `shoal train`.")
NAME = typer.Option("shoal", "--name", help="Of the job.")
NODES = typer.Option(1, "--nodes", min=1, help="Machines.")
GPUS = typer.Option(0, "--gpus", min=0, help="GPUs of each; as many processes. 0: none.")
PROCESSES = typer.Option(0, "--processes", min=0, help="On each machine, where it has no GPUs.")
GRACE = typer.Option(120, "--grace", min=20, help="Seconds from the warning to the end.")
SUBMIT = typer.Option(False, "--submit", help="Hand it to the client that is installed here.")
HOURS = typer.Option(24.0, "--hours", min=0.02, help="The job's limit of time.")
CPUS = typer.Option(4, "--cpus", min=1, help="Cores of each process.")
PARTITION = typer.Option("", "--partition", help="Slurm's; empty: its default.")
KIND = typer.Option("jobset", "--kind", help="jobset or trainjob.")
IMAGE = typer.Option(..., "--image", help="A container image with Shoal (Dockerfile).")
CLAIM = typer.Option("runs", "--claim", help="PersistentVolumeClaim of the run folders.")
HOSTS = typer.Option(..., "--hosts", help="A file with a line `HOST slots=N` for each machine.")
# A shell that ssh starts does not inherit the environment that is active here.
PYTHON = typer.Option(sys.executable, "--python", help="On each host; default: this one's path.")
FOLDER = typer.Option("", "--folder", help="Where the command is given; default: this folder.")


@app.callback()
def options() -> None:
    """Write the job of a run for a cluster, or hand it over."""


@app.command("slurm")
def slurm(
    arguments: list[str] = ARGUMENTS,
    name: str = NAME,
    nodes: int = NODES,
    gpus: int = GPUS,
    processes: int = PROCESSES,
    hours: float = HOURS,
    cpus: int = CPUS,
    partition: str = PARTITION,
    grace: int = GRACE,
    submit: bool = SUBMIT,
) -> None:
    """Print a batch script, or give it to sbatch: it saves before its time is over, then requeues.

    Slurm counts restarts, and the run goes on in the folder of the job's number.
    """
    job = _requested_job(arguments, name, nodes, gpus, processes, grace)
    text = jobs.make_slurm_script(job, hours=hours, cpus=cpus, partition=partition)
    _submit_text(["sbatch"], text) if submit else typer.echo(text, nl=False)


@app.command("kubernetes")
def kubernetes(
    arguments: list[str] = ARGUMENTS,
    image: str = IMAGE,
    kind: str = KIND,
    name: str = NAME,
    nodes: int = NODES,
    gpus: int = GPUS,
    processes: int = PROCESSES,
    claim: str = CLAIM,
    grace: int = GRACE,
    submit: bool = SUBMIT,
) -> None:
    """Print a JobSet or TrainJob with its secret, or give them to kubectl. They hold the token."""
    if kind not in ("jobset", "trainjob"):
        raise ConfigError(f"--kind {kind}: jobset or trainjob; try: --kind jobset")
    job = _requested_job(arguments, name, nodes, gpus, processes, grace)
    for key, value in (("run.name", name), ("run.folder", "/runs")):
        if not any(word.startswith(f"{key}=") for word in job.words):
            job = replace(job, words=(*job.words, f"{key}={value}"))
    token = read_token(os.environ).decode() or new_token()
    documents = jobs.make_kubernetes_documents(
        job, kind=kind, image=image, claim=claim, token=token
    )
    text = "".join(f"---\n{jobs.to_yaml(document)}\n" for document in documents)
    _submit_text(["kubectl", "apply", "-f", "-"], text) if submit else typer.echo(text, nl=False)


@app.command("ssh")
def ssh(
    arguments: list[str] = ARGUMENTS,
    hosts: Path = HOSTS,
    gpus: int = GPUS,
    processes: int = PROCESSES,
    folder: str = FOLDER,
    python: str = PYTHON,
    grace: int = GRACE,
    submit: bool = SUBMIT,
) -> None:
    """Print a script that starts the ranks of each host by ssh, or start them and wait."""
    found = jobs.read_hostfile(hosts)
    slots = {count for _, count in found if count} or {gpus or processes or 1}
    if len(slots) > 1:
        raise ConfigError(f"--hosts {hosts}: slots differ ({sorted(slots)}): as many on each host")
    each = processes or gpus or slots.pop()
    job = replace(_requested_job(arguments, "shoal", len(found), gpus, each, grace), python=python)
    names, where = [host for host, _ in found], folder or os.getcwd()
    if submit:
        raise typer.Exit(_start_over_ssh(job, names, where))
    typer.echo(jobs.make_ssh_script(job, names, where), nl=False)


def _requested_job(
    arguments: list[str] | None, name: str, nodes: int, gpus: int, processes: int, grace: int
) -> Job:
    """Return the requested job.

    Raises:
        ConfigError, PlanError: the options or the run's own arguments are wrong.
    """
    words = list(arguments or [])
    # A wrong key or a layout for another number of processes is reported before the job queues.
    loaded = load_config(*split_arguments(words))
    config = loaded.config
    each = processes or gpus or 1
    asked = collect_layout_keys(config.layout)
    settle_layout(make_plan(config), asked, nodes * each, None, read_machine_facts())
    if not name.replace("-", "").isalnum() or name != name.lower():
        raise ConfigError(f"--name {name}: small letters, digits and - only; try: --name shoal")
    said = {"run.name": config.run.name, "launch.processes": config.launch.processes}
    set_keys = frozenset(key for key, value in said.items() if value)
    return Job(tuple(words), name, nodes, each, gpus, grace, said=set_keys)


def _submit_text(command: list[str], text: str) -> None:
    """Pass a text to a client on its standard input.

    Raises:
        ClusterError: the client is not installed, or refuses the text.
    """
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"--submit: there is no {command[0]} here; try: without --submit, and "
            f"`{' '.join(command)}` with what is printed where there is one"
        )
    code = subprocess.run(command, input=text, text=True, check=False).returncode
    if code:
        raise ClusterError(f"--submit: {command[0]} ended with status {code}")


def _start_over_ssh(job: Job, hosts: list[str], folder: str) -> int:
    """Start every host's ranks and wait; return the first exit status that is not 0."""
    if shutil.which("ssh") is None:
        raise ClusterError("--submit: there is no ssh here")
    token = os.environ.get(TOKEN) or new_token()
    started = []
    for command in jobs.make_ssh_commands(job, hosts, folder):
        one = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        started.append(one)
        if one.stdin is not None:
            one.stdin.write(f"{token}\n")
            one.stdin.flush()
    codes: list[int] = []
    try:
        codes = [one.wait() for one in started]
    except KeyboardInterrupt:
        sys.stderr.write("shoal: Ctrl-C: the ranks save and stop\n")
        for one in started:
            if one.stdin is not None:
                one.stdin.close()  # closing stdin sends them SIGTERM
        codes = [one.wait() for one in started]
    return next((code for code in codes if code), 0)
