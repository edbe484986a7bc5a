"""Counts what a step really sends: the kernel's counters of a network namespace's loopback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.fabric import World
from shoal.trainer.parallelize import parallelize

WIDTH, BLOCKS, ROWS = 1024, 4, 2
TRIES, USUAL = 3, 1.005


class Pair(nn.Module):
    """Two layers: something that fsdp gathers and frees as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    """Blocks, and a head that lies in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def lo_sent_bytes() -> int:
    """Bytes that loopback of this process's network namespace has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("/proc/net/dev: no lo")


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - targets).square().sum(), targets.numel()


def count_sent(world: World) -> list[tuple[str, int, int]]:
    """From here on every collective of this world as (kind, payload bytes, degree)."""
    calls: list[tuple[str, int, int]] = []
    count = world.traffic.count

    def noting(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        calls.append((kind, payload_bytes, degree))
        count(kind, payload_bytes, degree, *axis)

    world.traffic.count = noting  # an instance's own name goes before its class's
    return calls


def measure(
    world: World, folder: str, layout: str, accumulate: int, defer_sync: bool = False
) -> dict[str, Any]:
    """Kernel bytes of one step of all ranks together, and what rank 0 says that it sent."""
    torch.manual_seed(0)
    metrics = Path(folder) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    run = parallelize(
        Stack(),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        squares,
        layout=layout,
        batch=ROWS * accumulate * world.size,
        micro_batch=ROWS,
        precision="fp32",
        defer_sync=defer_sync,
        folder=folder,
        world=world,
    )
    torch.manual_seed(world.rank)  # each rank its own samples
    x = torch.randn(ROWS * accumulate, WIDTH)
    calls = count_sent(world)
    least_bytes, told_bytes = math.inf, 0
    for _ in range(TRIES):
        calls.clear()
        world.barrier()
        before = lo_sent_bytes()
        world.barrier()  # nobody starts before everybody has read
        run.recorder.restart_clock()
        run.step((x, x))
        world.barrier()
        least_bytes = min(least_bytes, lo_sent_bytes() - before)
        row = json.loads(metrics.read_text().splitlines()[-1])
        told_bytes = row["comm_bytes"]
        # A busy machine makes TCP send small segments; headers only ever add to what is sent.
        if world.broadcast_json(least_bytes < USUAL * world.size * told_bytes):
            break
    del world.traffic.count
    for undo in run.program.on_close:
        undo()
    return {
        "gradient_bytes": 4 * run.plan.parameters,
        "root_bytes": 4 * WIDTH * WIDTH,
        "buckets": len(run.plan.buckets),
        "degrees": {k: v for k, v in run.plan.layout.degrees.items() if v > 1},
        "zero": run.plan.layout.zero,
        "kernel_bytes": least_bytes,
        "metrics_bytes": told_bytes,
        "by_kind": row["comm_bytes_by_kind"],
        "by_axis": row["comm_bytes_by_axis"],
        "calls": calls,
    }
