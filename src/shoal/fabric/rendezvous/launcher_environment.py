"""Rank and size of a process under torchrun, Slurm or Kubernetes, from its environment.

RANK, WORLD_SIZE, MASTER_ADDR   torchrun, Kubernetes · SLURM_PROCID, SLURM_NTASKS   srun

Each torchrun agent counts restarts for itself: an agent that joined later has counted none, and a
change of members counts as none (torch 2.13, `_invoke_run`). So its count is no name that all ranks
share. Each round has its own store, or the agents' store, in which the ranks agree on a name
(rendezvous_store.py).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.slurm import count_tasks
from shoal.wire.run_token import read_token

PR_SET_PDEATHSIG = 1


def read_process_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `Place` (process_info.py); none for a single process.

    Raises:
        ConfigError: a variable is no number; the message names it.
    """
    if env is os.environ:  # for this process, not for a test with its own variables
        die_with_agent(env)
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _number(env, "RANK")
        agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        elastic = "TORCHELASTIC_RUN_ID" in env  # a JobSet sets the count alone, the same for all
        return {
            "rank": rank,
            "size": _number(env, "WORLD_SIZE"),
            "local_rank": _number(env, "LOCAL_RANK", "0"),
            "local_size": _number(env, "LOCAL_WORLD_SIZE", "1"),
            "started_by": "torchrun",
            "host": env.get("MASTER_ADDR", "127.0.0.1"),
            "port": _number(env, "MASTER_PORT", "29500"),
            "hosts_store": rank == 0 and not agent_store,
            "attempt": "" if elastic else env.get("TORCHELASTIC_RESTART_COUNT", "0"),
            "agent_store": agent_store,
            "token": read_token(env),
        }
    if tasks := count_tasks(env):
        rank = _number(env, "SLURM_PROCID")
        job = _number(env, "SLURM_JOB_ID", "0")
        first = first_host(env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        return {
            "rank": rank,
            "size": _number({"SLURM_NTASKS": tasks}, "SLURM_NTASKS"),
            "local_rank": _number(env, "SLURM_LOCALID", "0"),
            "local_size": _local_tasks(env.get("SLURM_NTASKS_PER_NODE", "1")),
            "started_by": "Slurm",
            "host": env.get("MASTER_ADDR") or first,
            "port": _number(env, "MASTER_PORT", str(20000 + job % 20000)),
            "hosts_store": rank == 0,
            "attempt": env.get("SLURM_RESTART_COUNT", "0"),
            "token": read_token(env),
        }
    return {}


def die_with_agent(env: Mapping[str, str]) -> None:
    """Have the kernel kill this process when the torchrun agent that started it ends (Linux).

    A killed agent leaves its workers running; they would block the next start.
    """
    agent = os.getppid()
    if "TORCHELASTIC_RUN_ID" not in env or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it ended before prctl took effect
        os._exit(1)


def first_host(nodelist: str) -> str:
    """Return the first host name of Slurm's compressed node list.

    >>> first_host("a[3,5-9],b2"), first_host("n1,n2")
    ('a3', 'n1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST = {nodelist!r}: holds no host name")
    stem, numbers = match.groups()
    return stem + re.split(r"[,-]", numbers)[0] if numbers else stem


def _local_tasks(text: str) -> int:
    return int(re.split(r"\D", text)[0] or 1)


def _number(env: Mapping[str, str], key: str, default: str | None = None) -> int:
    value = env.get(key, default)
    if value is None or not value.isdigit():
        raise ConfigError(f"environment variable {key} = {value!r}: a whole number is needed")
    return int(value)
