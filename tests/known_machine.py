"""A machine that counts as measured for a session of tests, so that no command measures it.

Measuring takes a command four CPU seconds per number of ranks, and what comes of it depends on what
else runs: under load `auto` chose zero1 where it chooses ddp on an idle machine. Tests of the
measurement itself have cache folders of their own.

The figures are those of two cores of an EPYC (2.6 GHz), alone, rounded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from shoal.forecast.machines.measured_machine import VERSION, machine_path

RANKS = (1, 2, 4)
LINK = {"latency_s": 2e-4, "bytes_per_s": 1.2e9, "error": 0.05}
RATES = {
    "matrix": {
        "fp64": [[5e5, 2.5e10], [3e7, 3.5e10], [2e9, 3.5e10]],
        "fp32": [[5e5, 4e10], [3e7, 6e10], [2e9, 6e10]],
        "bf16": [[5e5, 2e10], [3e7, 1e11], [2e9, 1e11]],
    },
    "stream": [[131072, 6e10], [4194304, 4e10], [33554432, 8e9]],
    "host_bytes_per_s": 7e9,
    "disk_bytes_per_s": 2e9,
    "operation_s": 3e-6,
    "operation_backward_s": 4e-6,
}


def write_machine(cache: Path) -> None:
    """Write what a measurement with 1, 2 and 4 ranks of a thread each would have written."""
    memory_bytes = psutil.virtual_memory().total
    for ranks in RANKS:
        inside = {"ranks": ranks, "all_reduce": LINK, "reduce_scatter": LINK, "all_gather": LINK}
        document = {
            "version": VERSION,
            "kind": "cpu",
            "device": f"{os.cpu_count()} cores / {ranks}",
            "processes": ranks,
            "local": ranks,
            "threads": 1,
            "when": "2026-11-28",
            "memory_bytes": memory_bytes / ranks,
            "node_memory_bytes": memory_bytes,
            "process_bytes": 2.6e8,
            **RATES,
            "links": {"inside": inside} if ranks > 1 else {},
        }
        path = machine_path(cache, ranks, "cpu", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
