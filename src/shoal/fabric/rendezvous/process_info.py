"""A place: which process this is among those started together, read from environment variables.

No sockets and no torch here, so the rules can be tested with plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where a process stands among those started with it, and where they meet.

    Attributes:
        rank, size: its number among all processes, and how many there are.
        local_rank, local_size: the same on this machine.
        started_by: the launcher, for messages.
        file: where they meet on one machine: a file that no other user can open; "": elsewhere.
        host, port: address of the store where they meet.
        hosts_store: this process runs that store.
        agent_store: torchrun does.
        token: by which those who meet there know each other; empty: they do not.
        attempt: how many times this job was restarted before; names the meeting.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    started_by: str = "no launcher"
    host: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = False
    attempt: str = "0"
    file: str = ""
    agent_store: bool = False
    token: bytes = field(default=b"", repr=False)

    @property
    def meets_at(self) -> str:
        """Where the processes meet, in words."""
        return self.file or f"{self.host}:{self.port}"


def find_place(env: Mapping[str, str]) -> Place:
    """The place described by the environment: Shoal's supervisor, torchrun, Slurm, or alone.

    Errors: ConfigError naming a variable that is missing or is no number.

    >>> find_place({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77",
    ...             "SLURM_JOB_NODELIST": "gpu[07-08,11]"}).host
    'gpu07'
    """
    if "SHOAL_STORE" in env:
        return Place(
            rank=int(env["RANK"]),
            size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_size=int(env["LOCAL_WORLD_SIZE"]),
            started_by="shoal",
            attempt=env.get("SHOAL_ATTEMPT", "0"),
            file=env["SHOAL_STORE"],
        )
    if "RANK" in env or "SLURM_PROCID" in env:
        from shoal.fabric.rendezvous.launcher_environment import (
            find_fields,  # a supervised rank needs none of it
        )

        return Place(**find_fields(env))
    return Place()
