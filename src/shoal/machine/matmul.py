"""Measured matrix-product rate of this machine, the reference of MFU.

All ranks multiply square matrices at the same moment, since they share cores and memory; the sum
of their rates is the machine's. The best of several rounds counts: a rate that other work lowered
would inflate MFU. The cache has one rate per machine, dtype, threads and ranks, with its date. A
start measures again, and keeps the better of both, if the cached rate

    was measured while other work had the cores        a thread got less than QUIET of a core
    was exceeded by a run's steps                      `invalidate_rate`
    has no date (an older version wrote it)

After KEEP_DAYS a start measures anew and ignores the cached rate: drivers and machines change.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.fabric import World
from shoal.fabric.device import device_name, is_accelerator, synchronize

ROUNDS = 12
SMALLEST, LARGEST = 512, 8192
"""Sides of the matrices. On a CPU small products are as fast as large ones or faster, since they
stay in its caches, which other ranks share."""
LONG_S = {"cpu": 0.002, "accelerator": 0.05}
"""Seconds of one product from which the matrices are large enough."""
KEEP_DAYS = 30
QUIET = 0.9
DAY_S = 86400
FILE = "matmul.json"
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class CachedRate:
    """A cached matrix rate.

    Attributes:
        measured_s: time of the measurement, seconds since 1970.
        doubt: reason to measure it again; "" if there is none.
    """

    flops_per_s: float
    measured_s: float
    doubt: str = ""


def matmul_flops_per_s(world: World, precision: str, cache: Path) -> float:
    """Return the FLOP/s of matrix products that all ranks reach together; same on every rank.

    A collective. If no rate is cached, or it is older than 30 days or doubted (`invalidate_rate`),
    all ranks measure at once, and rank 0 writes the result to `cache`. The better of both rates
    counts, unless the cached one is old.

    Args:
        precision: fp64, fp32, bf16, fp16.
        cache: folder of rates by machine, precision, threads and number of ranks.
    """
    dtype, key = _product_format(world, precision), _key(world, precision)
    known = _read(cache, key) if world.is_first else None
    fresh = known is not None and not known.doubt and not _is_old(known)
    found = world.broadcast_json(known.flops_per_s if known is not None and fresh else None)
    if found:
        return float(found)
    world.barrier()
    told = world.gather_json(_measure_flops_per_s(DTYPES[dtype], world.device))
    now = CachedRate(sum(rate for rate, _ in told), time.time())
    if not all(quiet for _, quiet in told):
        now = replace(now, doubt="busy")
    if known is not None and not _is_old(known) and known.flops_per_s > now.flops_per_s:
        now = replace(now, flops_per_s=known.flops_per_s)
    if world.is_first:
        _write(cache, key, now)
    return float(world.broadcast_json(now.flops_per_s))


def invalidate_rate(world: World, precision: str, cache: Path) -> str:
    """Mark the cached matrix rate as doubted, so that the next start measures it again.

    For a run whose steps exceed that rate; one rank calls it.

    Args:
        precision, cache: as in `matmul_flops_per_s`.

    Returns:
        A line for the user. Nothing is written without a cached rate or a writable cache.
    """
    key = _key(world, precision)
    known = _read(cache, key)
    if known is None:
        return "MFU: steps pass this machine's matrix rate, which is measured at the next start"
    _write(cache, key, replace(known, doubt="passed"))
    day = time.strftime("%Y-%m-%d", time.localtime(known.measured_s))
    return (
        f"MFU: steps pass the {known.flops_per_s / 1e9:.1f} GFLOP/s that this machine's matrix "
        f"products reached when they were measured ({day}), so it is left out; the next start "
        f"measures again"
    )


def _is_old(known: CachedRate) -> bool:
    age_s = time.time() - known.measured_s
    return not 0 <= age_s <= KEEP_DAYS * DAY_S


def _product_format(world: World, precision: str) -> str:
    """Return the format of the matrix products: fp32 where the device emulates fp16."""
    return "fp32" if precision == "fp16" and world.device.type == "cpu" else precision


def _measure_flops_per_s(dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """Measure the FLOP/s of this rank, and whether it had its cores for itself."""
    long_s = LONG_S["accelerator" if is_accelerator(device) else "cpu"]
    size = SMALLEST
    while True:
        best_s, busy_s = _product_s(size, dtype, device)
        if size == LARGEST or best_s > long_s:
            break
        size *= 2
    quiet = is_accelerator(device) or busy_s >= QUIET * best_s
    return 2 * size**3 / best_s, quiet


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return seconds and CPU seconds of the fastest product of two `size` × `size` matrices."""
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    best_s, busy_s = float("inf"), 0.0
    for _ in range(ROUNDS):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        torch.mm(left, right, out=out)
        synchronize(device)
        took_s = time.perf_counter() - began_s
        if took_s < best_s:
            best_s, busy_s = took_s, time.thread_time() - began_cpu_s
    return best_s, busy_s


def _key(world: World, precision: str) -> str:
    chip = platform.processor() or platform.machine()
    if is_accelerator(world.device):
        chip = device_name(world.device)
    return (
        f"{platform.node()}/{chip}/{os.cpu_count()} cores/torch {torch.__version__}/"
        f"{_product_format(world, precision)} from {SMALLEST}/"
        f"{torch.get_num_threads()} threads × {world.size}"
    )


def _read(cache: Path, key: str) -> CachedRate | None:
    found = read_object(cache / FILE).get(key)
    if is_number(found) and found > 0:  # an older version stored only the rate
        return CachedRate(float(found), time.time(), "undated")
    if not isinstance(found, dict):
        return None
    kept: dict[str, Any] = found
    rate, when, doubt = (kept.get(name) for name in ("flops_per_s", "measured_s", "doubt"))
    if not (is_number(rate) and is_number(when) and isinstance(doubt, str) and rate > 0):
        return None
    return CachedRate(float(rate), float(when), doubt)


def _write(cache: Path, key: str, value: CachedRate) -> None:
    path = cache / FILE
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**read_object(path), key: asdict(value)}), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return  # an unwritable cache costs only the next measurement
