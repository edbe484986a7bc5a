"""Rank, size and rendezvous address of this process, read from environment variables.

No sockets and no torch here, so the rules can be tested with plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessInfo:
    """Rank and size of a process, and its rendezvous.

    Attributes:
        rank, size: its global rank, and the number of processes.
        local_rank, local_size: the same on this machine.
        started_by: the launcher, for messages.
        file: rendezvous file on one machine, which no other user can open; "": not used.
        host, port: address of the rendezvous store.
        hosts_store: this process runs that store.
        agent_store: torchrun's agent runs it.
        token: shared secret of the store's clients; empty: no authentication.
        attempt: earlier restarts of this job; part of the rendezvous name.
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
    def rendezvous_text(self) -> str:
        """Description of the rendezvous, for messages."""
        return self.file or f"{self.host}:{self.port}"


def read_process_info(env: Mapping[str, str]) -> ProcessInfo:
    """Return the process info of the environment: Shoal's supervisor, torchrun, Slurm, or alone.

    Raises a ConfigError that names a variable which is missing or is no number.

    >>> read_process_info(
    ...     {
    ...         "SLURM_PROCID": "3",
    ...         "SLURM_NTASKS": "4",
    ...         "SLURM_JOB_ID": "77",
    ...         "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    ...     }
    ... ).host
    'gpu07'
    """
    if "SHOAL_STORE" in env:
        return ProcessInfo(
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
            read_process_fields,  # a supervised rank needs none of it
        )

        return ProcessInfo(**read_process_fields(env))
    return ProcessInfo()
