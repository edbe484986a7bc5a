"""Counts what a step really sends: the kernel's counters of a network namespace's loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.fabric import World
from shoal.trainer.parallelize import parallelize

WIDTH, LAYERS, ROWS = 1024, 9, 2


def lo_sent_bytes() -> int:
    """Bytes that loopback of this process's network namespace has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("/proc/net/dev: no lo")


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - targets).square().sum(), targets.numel()


def measure(world: World, folder: str, accumulate: int, steps: int) -> dict[str, Any]:
    """Kernel bytes per step of all ranks together, and what metrics.jsonl says rank 0 sent."""
    torch.manual_seed(0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    run = parallelize(
        nn.Sequential(*layers),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        squares,
        layout="ddp",
        batch=ROWS * accumulate * world.size,
        micro_batch=ROWS,
        precision="fp32",
        folder=folder,
        world=world,
    )
    x = torch.randn(ROWS * accumulate, WIDTH)
    run.step((x, x))
    kernel_bytes = []
    for _ in range(steps):
        world.barrier()
        before = lo_sent_bytes()
        world.barrier()  # nobody starts before everybody has read
        run.recorder.restart_clock()
        run.step((x, x))
        world.barrier()
        kernel_bytes.append(lo_sent_bytes() - before)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        "gradient_bytes": sum(p.numel() * p.element_size() for p in run.model.parameters()),
        "buckets": len(run.plan.buckets),
        "kernel_bytes": kernel_bytes,
        "metrics_bytes": [row["comm_bytes"] for row in rows[-steps:]],
    }
