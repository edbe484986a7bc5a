"""A place: which process this is among those started together, read from environment variables.

No sockets and no torch here, so the rules can be tested with plain dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a process stands among those started with it, and where they meet.

    rank, size    its number among all processes, and how many there are
    local_rank, local_size   the same on this machine · started_by  the launcher, for messages
    host, port    address of the store where they meet
    hosts_store   this process runs that store
    listen_fd     a socket, already bound to a private address, that the store shall listen on
    attempt       how many times this job was restarted before; names the meeting
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    started_by: str = "no launcher"
    host: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = False
    listen_fd: int | None = None
    attempt: str = "0"


def find_place(env: Mapping[str, str]) -> Place:
    """The place described by the environment: Shoal's supervisor, torchrun, Slurm, or alone.

    Errors: ConfigError naming a variable that is missing or is no number.

    >>> find_place({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77",
    ...             "SLURM_JOB_NODELIST": "gpu[07-08,11]"}).host
    'gpu07'
    """
    if "SHOAL_STORE_PORT" in env:
        rank = _number(env, "RANK")
        return Place(
            rank=rank,
            size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK"),
            local_size=_number(env, "LOCAL_WORLD_SIZE"),
            started_by="shoal",
            port=_number(env, "SHOAL_STORE_PORT"),
            hosts_store=rank == 0,
            listen_fd=_number(env, "SHOAL_STORE_FD") if rank == 0 else None,
            attempt=env.get("SHOAL_ATTEMPT", "0"),
        )
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _number(env, "RANK")
        return Place(
            rank=rank,
            size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK", "0"),
            local_size=_number(env, "LOCAL_WORLD_SIZE", "1"),
            started_by="torchrun",
            host=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT", "29500"),
            hosts_store=rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        rank = _number(env, "SLURM_PROCID")
        job = _number(env, "SLURM_JOB_ID", "0")
        return Place(
            rank=rank,
            size=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID", "0"),
            local_size=_local_tasks(env.get("SLURM_NTASKS_PER_NODE", "1")),
            started_by="Slurm",
            host=env.get("MASTER_ADDR") or first_host(env.get("SLURM_JOB_NODELIST", "127.0.0.1")),
            port=_number(env, "MASTER_PORT", str(20000 + job % 20000)),
            hosts_store=rank == 0,
            attempt=env.get("SLURM_RESTART_COUNT", "0"),
        )
    return Place()


def first_host(nodelist: str) -> str:
    """The first name in Slurm's compressed list of hosts.

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
