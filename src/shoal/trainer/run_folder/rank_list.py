"""List of a run's ranks: `ranks.json`, with host, device and process id of each.

    {"time_s": 1764400000.0,
     "ranks": [{"rank": 0, "host": "a", "device": "cuda:0", "device_name": "NVIDIA H100",
                "pid": 4711, "local_rank": 0}, …]}

It is written once per start by the process that keeps the folder: rank 0, on nodes with own disks
the first rank of each, the first server of parameter servers. Readers tell by it which machine and
which device a slow rank is on. Runs of older versions have no such file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from shoal.base.runlog.atomic_files import write_atomically
from shoal.fabric import World
from shoal.fabric.device import device_name, is_accelerator

RANKS_FILE = "ranks.json"


def write_rank_list(folder: Path, world: World, *, writes: bool) -> None:
    """Write ranks.json, with the entries of all ranks; every rank of the run calls it.

    The ranks' entries travel through the rendezvous store, so no collective is added, and ranks
    that do not write do not wait. A full disk does not stop the run.

    Args:
        folder: the run folder.
        world: all ranks of the run.
        writes: whether this rank keeps the folder.
    """
    told = world.collect_json(_describe_rank(world), here=writes)
    if not writes or told is None:
        return
    record = {"time_s": time.time(), "ranks": told}
    with contextlib.suppress(OSError):
        write_atomically(folder / RANKS_FILE, json.dumps(record))


def _describe_rank(world: World) -> dict[str, Any]:
    """Return this rank's entry."""
    device = world.device
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "device": str(device),
        "device_name": device_name(device) if is_accelerator(device) else "",
        "pid": os.getpid(),
        "local_rank": world.local_rank,
    }
