"""Job files of a run, as a person would write them: for Slurm, Kubernetes and ssh.

All start one process per GPU (or the requested number), with a token that only the processes of
this run know (wire/run_token.py). The ranks get a warning long enough before the end to save
(`grace_s`). The run folder outlives the job, and the run resumes from it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError

PORT = 29400
STOPPED = "138|143"
"""Statuses of a run that saved and stopped, by SIGUSR1 and by SIGTERM."""
PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=@%+,")


@dataclass(frozen=True)
class Job:
    """Description of a job.

    Attributes:
        words: arguments of `shoal train`: a run.toml and overrides.
        name: of the job.
        nodes: machines.
        processes: on each.
        gpus: on each; 0: none.
        grace_s: seconds from the warning to the end.
        python: interpreter; empty: the one in the node's PATH.
        said: keys of run.toml that the user's words or file set.
    """

    words: tuple[str, ...]
    name: str = "shoal"
    nodes: int = 1
    processes: int = 1
    gpus: int = 0
    grace_s: int = 120
    python: str = ""
    said: frozenset[str] = frozenset()

    @property
    def train_command(self) -> list[str]:
        """Return the `shoal train` command, whose grace period ends before the job is killed."""
        grace = f"launch.grace_s={max(1, self.grace_s - 10)}"
        shoal = [self.python, "-m", "shoal"] if self.python else ["shoal"]
        return [*shoal, "train", *self.words, grace]


def make_slurm_script(job: Job, *, hours: float, cpus: int, partition: str = "") -> str:
    """Return the text of a batch script for `sbatch`.

    Slurm sends SIGUSR1 to the ranks `grace_s` seconds before the time is over. They save and stop,
    and the script requeues the job. It resumes in the same folder, named after the job's number, if
    Slurm counts a restart. A single task starts its processes itself: its command has the number of
    processes, and the folder. A task of an array is requeued alone.
    """
    alone = {"run.name": '"run.name=job-$SLURM_JOB_ID"', "launch.processes": "launch.processes=1"}
    is_alone = job.nodes * job.processes == 1
    more = [word for key, word in alone.items() if is_alone and key not in job.said]
    command = " ".join([shlex.join(job.train_command), *more])
    minutes = round(hours * 60)
    options = {
        "job-name": job.name,
        "partition": partition,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes,
        "gpus-per-node": job.gpus or "",
        "cpus-per-task": cpus,
        "time": f"{minutes // 60}:{minutes % 60:02}:00",
        "signal": f"USR1@{job.grace_s}",
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value != ""]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            "# Ranks of this job alone know this; it is in no list of processes.",
            "SHOAL_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "export SHOAL_TOKEN OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
            "",
            f"srun --kill-on-bad-exit=1 {command}",
            "code=$?",
            f"case $code in {STOPPED})  # it saved and stopped: go on where it was",
            "    array=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
            '    scontrol requeue "${array:-$SLURM_JOB_ID}" ;;',
            "esac",
            "exit $code",
            "",
        ]
    )


def make_node_command(job: Job, node: str, *more: str) -> list[str]:
    """Return the command that starts the ranks of one node (node.py)."""
    return [
        *(job.python or "python", "-m", "shoal.launch.node"),
        *("--nodes", str(job.nodes), "--node", node),
        *(
            "--processes",
            str(job.processes),
            "--grace",
            str(job.grace_s),
            *more,
            "--",
            *job.train_command,
        ),
    ]


def make_ssh_commands(job: Job, hosts: Sequence[str], folder: str) -> list[list[str]]:
    """Return the command that starts each host's ranks; each reads the token from standard input.

    Args:
        hosts: the ranks connect to the first one.
        folder: working folder of the command on every host.
    """
    meets = f"MASTER_ADDR={shlex.quote(hosts[0].rpartition('@')[2])} MASTER_PORT={PORT}"
    return [
        ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", host,
         f"cd {shlex.quote(folder)} && exec env {meets} "
         f"{shlex.join(make_node_command(job, str(number), '--stdin'))}"]
        for number, host in enumerate(hosts)
    ]  # fmt: skip


def make_ssh_script(job: Job, hosts: Sequence[str], folder: str) -> str:
    """Return `make_ssh_commands` as a shell script; Ctrl-C lets the ranks save and stop."""
    starts = [
        f"token_and_wait | {shlex.join(command)} &"
        for command in make_ssh_commands(job, hosts, folder)
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            "token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "# The token is no word of a command, which others could list; the input stays open,",
            "# and its end is the end of the ranks.",
            'token_and_wait() { echo "$token"; exec sleep infinity; }',
            "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
            *starts,
            "wait -n",
            "",
        ]
    )


def read_hostfile(path: Path) -> list[tuple[str, int]]:
    """Return (host, slots) of each line `HOST [slots=N]` of a hostfile; 0 without slots.

    Raises:
        ConfigError: the file has no valid list of hosts; the message names the line.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as failure:
        raise ConfigError(
            f"--hosts {path}: {failure.strerror}; it has a line `HOST slots=N` for each machine"
        ) from failure
    except UnicodeDecodeError as failure:
        raise ConfigError(f"--hosts {path}: no text, so no list of hosts") from failure
    for number, line in enumerate(lines, 1):
        host, *rest = line.partition("#")[0].split() or [""]
        slots = rest[0].removeprefix("slots=") if rest else "0"
        if len(rest) > 1 or not slots.isdecimal() or host.startswith("-"):
            raise ConfigError(f"{path}, line {number}: {line.strip()!r} is not HOST slots=N")
        if host:
            found.append((host, int(slots)))
    if not found:
        raise ConfigError(f"--hosts {path}: names no host")
    return found


def make_kubernetes_documents(
    job: Job, *, kind: str, image: str, claim: str, token: str
) -> list[dict[str, Any]]:
    """Return the documents of a job on Kubernetes: a secret with the token, and the job.

    Args:
        kind: jobset (JobSet's controller) or trainjob (Kubeflow Trainer's, runtime
            torch-distributed).
        claim: the PersistentVolumeClaim for the run folders, mounted at /runs.
    """
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job.name}-token"},
        "stringData": {"token": token},
    }
    if kind == "trainjob":
        return [secret, _trainjob(job, image, claim)]
    return [secret, _jobset(job, image, claim)]


def _container(job: Job, image: str, node: str, master: str) -> dict[str, Any]:
    alive = "/tmp/shoal-alive"
    # A JobSet counts its restarts on each pod; from the second start on the run is resumed.
    count = {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}
    key = {"name": f"{job.name}-token", "key": "token"}
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    # The shell inserts the pod's variables; exec makes SIGTERM reach the starter.
    command = shlex.join(make_node_command(job, "NODE", "--alive", alive)).replace(
        "NODE", f'"${node}"'
    )
    return {
        "image": image,
        "command": ["sh", "-c", f'export MASTER_ADDR="{master}"; exec {command}'],
        "env": [
            {"name": "MASTER_PORT", "value": str(PORT)},
            {"name": "TORCHELASTIC_RESTART_COUNT", "valueFrom": {"fieldRef": count}},
            {"name": "SHOAL_TOKEN", "valueFrom": {"secretKeyRef": key}},
        ],
        "resources": {"limits": limits} if limits else {},
        "livenessProbe": {
            "exec": {
                "command": ["sh", "-c", f"test $(($(date +%s) - $(stat -c %Y {alive}))) -lt 60"]
            },
            "initialDelaySeconds": 60,
            "periodSeconds": 20,
            "failureThreshold": 3,
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _volumes(claim: str) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _jobset(job: Job, image: str, claim: str) -> dict[str, Any]:
    container = _container(job, image, "JOB_COMPLETION_INDEX", f"{job.name}-node-0-0.{job.name}")
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{"name": "ranks", **container}],
        "volumes": _volumes(claim),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": 3},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": job.nodes,
                            "completions": job.nodes,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "template": {"spec": pod},
                        }
                    },
                }
            ],
        },
    }


def _trainjob(job: Job, image: str, claim: str) -> dict[str, Any]:
    container = _container(job, image, "PET_NODE_RANK", "$PET_MASTER_ADDR")
    trainer = {
        "image": image,
        "command": container["command"],
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        "env": container["env"],
        "resourcesPerNode": container["resources"],
    }
    # Probes belong to the runtime: a TrainJob cannot define them.
    pod = {
        "terminationGracePeriodSeconds": job.grace_s,
        "volumes": _volumes(claim),
        "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}],
    }
    of_job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "shoal.launch/trainjob",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [of_job]}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [patch],  # Trainer 2.2; podTemplateOverrides before that
        },
    }


def to_yaml(value: Any, indent: str = "") -> str:
    """Return a document of tables, lists, texts and numbers as YAML.

    >>> print(to_yaml({"a": [1, "b: c"], "d": {"e": True}}))
    a:
      - 1
      - "b: c"
    d:
      e: true
    """
    lines = []
    if isinstance(value, dict):
        for key, one in value.items():
            lines.append(_entry(f"{indent}{_scalar(key)}:", one, f"{indent}  "))
    else:
        for one in value:
            inner = to_yaml(one, f"{indent}  ") if _is_nested(one) else _scalar(one)
            lines.append(f"{indent}- {inner.strip()}")
    return "\n".join(lines)


def _entry(head: str, value: Any, indent: str) -> str:
    return f"{head}\n{to_yaml(value, indent)}" if _is_nested(value) else f"{head} {_scalar(value)}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and value[:1].isalpha() and set(value) <= PLAIN
    words = ("true", "false", "null", "yes", "no", "on", "off")
    if plain and value.lower() not in words and not value.endswith(":"):
        return str(value)
    return json.dumps(value)
