"""This machine's matrix rate: what MFU is measured against.

All ranks multiply square matrices at the same moment, since cores and memory are shared, and the
sum of their rates is the machine's. The best of several rounds counts: MFU against a rate that was
disturbed by something else would flatter. Cached per machine, dtype, threads and ranks, with the
date; a start measures again, and keeps the better of both, where the known rate

    was measured while something else had the cores      a thread got less than QUIET of a core
    was passed by a run's steps                          `distrust`
    has no date (an older version wrote it)

and measures anew, whatever was known, after KEEP_DAYS: drivers and machines change.
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
"""Widths of the products. On a CPU small ones reach as much as large ones or more, since they stay
in its caches, which other ranks use too."""
LONG_S = {"cpu": 0.002, "accelerator": 0.05}
"""One product that takes longer is large enough."""
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
class Known:
    """A rate as it is kept.

    Attributes:
        measured_s: when, seconds since 1970.
        doubt: why it is to be measured again; "" if it is not.
    """

    flops_per_s: float
    measured_s: float
    doubt: str = ""


def matmul_flops_per_s(world: World, precision: str, cache: Path) -> float:
    """Returns the FLOP/s of matrix products that all ranks reach together; the same on every rank.

    A collective: where no rate is known, or it is older than 30 days or doubted (`distrust`), all
    ranks measure at once, and rank 0 writes the result to `cache`; the better of both counts,
    unless the known one is old.

    Args:
        precision: fp64, fp32, bf16, fp16.
        cache: folder of measured rates, of this machine, precision, threads and number of ranks.
    """
    dtype, key = _multiplies(world, precision), _key(world, precision)
    known = _read(cache, key) if world.is_first else None
    fresh = known is not None and not known.doubt and not _is_old(known)
    found = world.broadcast_json(known.flops_per_s if known is not None and fresh else None)
    if found:
        return float(found)
    world.barrier()
    told = world.gather_json(_measure(DTYPES[dtype], world.device))
    now = Known(sum(rate for rate, _ in told), time.time())
    if not all(quiet for _, quiet in told):
        now = replace(now, doubt="busy")
    if known is not None and not _is_old(known) and known.flops_per_s > now.flops_per_s:
        now = replace(now, flops_per_s=known.flops_per_s)
    if world.is_first:
        _write(cache, key, now)
    return float(world.broadcast_json(now.flops_per_s))


def distrust(world: World, precision: str, cache: Path) -> str:
    """Mark the known matrix rate as doubted, in `cache`, so that the next start measures it again.

    For a run whose steps pass that rate; one rank calls it.

    Args:
        precision, cache: as `matmul_flops_per_s` has them.

    Returns:
        a line for the user; nothing is written where no rate is known or the cache takes none.
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


def _is_old(known: Known) -> bool:
    age_s = time.time() - known.measured_s
    return not 0 <= age_s <= KEEP_DAYS * DAY_S


def _multiplies(world: World, precision: str) -> str:
    """The format that multiplies: where fp16 is imitated, that is fp32."""
    return "fp32" if precision == "fp16" and world.device.type == "cpu" else precision


def _measure(dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """(FLOP/s of this rank, whether it had its cores for itself)."""
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
    """Seconds of the fastest of some products of two `size` × `size` matrices, and CPU seconds."""
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
        f"{_multiplies(world, precision)} from {SMALLEST}/"
        f"{torch.get_num_threads()} threads × {world.size}"
    )


def _read(cache: Path, key: str) -> Known | None:
    found = read_object(cache / FILE).get(key)
    if is_number(found) and found > 0:  # of an older version, which said no more
        return Known(float(found), time.time(), "undated")
    if not isinstance(found, dict):
        return None
    kept: dict[str, Any] = found
    rate, when, doubt = (kept.get(name) for name in ("flops_per_s", "measured_s", "doubt"))
    if not (is_number(rate) and is_number(when) and isinstance(doubt, str) and rate > 0):
        return None
    return Known(float(rate), float(when), doubt)


def _write(cache: Path, key: str, value: Known) -> None:
    path = cache / FILE
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**read_object(path), key: asdict(value)}), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return  # the cache only saves time
