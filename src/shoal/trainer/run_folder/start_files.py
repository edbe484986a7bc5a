"""Files that each start writes: `ranks.json`, and `plan.json` of a loop of the user's own.

    {"time_s": 1764400000.0,
     "ranks": [{"rank": 0, "host": "a", "device": "cuda:0", "device_name": "NVIDIA H100",
                "pid": 4711, "local_rank": 0, "threads": 8,
                "processor": "AMD EPYC 9354", "instructions": "AVX512", "deterministic": false}, …]}

The process that keeps the folder writes them: rank 0, on nodes with own disks the first rank of
each, the first server of parameter servers. Readers tell by ranks.json which machine and which
device a slow rank is on, and by plan.json the layout; runs of older versions lack them. `shoal
train` writes plan.json itself, with a forecast (jobs/opening_lines.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shoal.base.plans.plan import Plan
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


def write_loop_plan(
    plan: Plan, total_steps: int, folder: Path, world: World, *, knows_batch: bool = True
) -> None:
    """Write plan.json into the folder of a run that `shoal train` did not start.

    Ranks that do not keep the folder write nothing. A full disk does not stop the run.

    Args:
        plan: of the run.
        total_steps: length of the run; 0: unknown.
        folder: the run folder.
        world: all ranks of the run.
        knows_batch: the batch of the plan is what a step trains on: it was given, or the run's
            loader deals it. Else a step may have any number of samples, and 0 is written.
    """
    if not world.writes_files or (folder / "run.toml").exists():
        return
    if not knows_batch:
        plan = replace(plan, batch=0, micro_batch=0, accumulate=0)
    about = {"chosen": False, "unit": "targets", "device": world.device.type}
    steps = {"steps": total_steps} if total_steps else {}
    with contextlib.suppress(OSError):
        write_atomically(folder / "plan.json", plan.to_json({**steps, **about}))


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
        "threads": torch.get_num_threads(),
        "processor": _processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@cache
def _processor_name() -> str:
    """Return the name of this machine's processor; sums of its kernels may round in its own way."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
