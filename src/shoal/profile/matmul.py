"""This machine's matrix rate: what MFU is measured against.

All ranks multiply square matrices at the same moment, since cores and memory are shared, and the
sum of their rates is the machine's. The best of several rounds counts: MFU against a rate that was
disturbed by something else would flatter. Cached per machine, dtype, threads and ranks.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

from shoal.fabric import World

ROUNDS = 6
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def matmul_flops_per_s(world: World, precision: str, cache: Path) -> float:
    """FLOP/s of all ranks together in `precision` (fp64 … fp16); same value on every rank.

    cache    folder for the measured value; a run on the same machine reads it instead
    """
    if precision == "fp16" and world.device.type == "cpu":
        precision = "fp32"  # where fp16 is imitated, that is what multiplies
    found = world.broadcast_json(_read(cache, _key(world, precision)) if world.is_first else None)
    if found:
        return float(found)
    world.barrier()
    total = sum(world.gather_json(_measure(DTYPES[precision], world.device)))
    if world.is_first:
        _write(cache, _key(world, precision), total)
    return float(total)


def _measure(dtype: torch.dtype, device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s


def _key(world: World, precision: str) -> str:
    chip = platform.processor() or platform.machine()
    if world.device.type == "cuda":
        chip = torch.cuda.get_device_name(world.device)
    return (
        f"{platform.node()}/{chip}/{os.cpu_count()} cores/torch {torch.__version__}/{precision}/"
        f"{torch.get_num_threads()} threads × {world.size}"
    )


def _read(cache: Path, key: str) -> float | None:
    try:
        value = json.loads((cache / "matmul.json").read_text()).get(key)
        return float(value) if value else None
    except (OSError, ValueError, AttributeError):
        return None


def _write(cache: Path, key: str, value: float) -> None:
    path = cache / "matmul.json"
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**known, key: value}))
        fresh.replace(path)
    except OSError:
        return  # the cache only saves time
