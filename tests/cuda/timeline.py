"""Where the host waits for the device, and whether the device is kept busy: a step's timeline.

torch names every call that waits (`torch.cuda.set_sync_debug_mode`), with the line it came from; its
profiler tells when each kernel was launched and when it began. A CPU runs the same lines unwatched.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import shoal
from child import Sheet
from device import DEVICE, ON_GPU, SMALL, pick, synchronize
from one import Tokens
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.optim.build import build_optimizer

SIZE = pick({"dim": 1024, "layers": 12, "heads": 16}, {"dim": 64, "layers": 2, "heads": 4})
SEQUENCE, MICRO_BATCH, ACCUMULATE = pick(1024, 16), pick(8, 2), 2
WARM_UP, STEPS = 8, 4  # steps 1, 2, 4, 8, 16, … read all weights
WAITS_PER_STEP, BEGIN_LATER = 1, 0.95


def timeline(sheet: Sheet) -> None:
    """A run as `shoal train` makes it: bf16, fused AdamW, clipping, from the loader on."""
    world = start_world({})
    world.device = DEVICE
    torch.manual_seed(0)
    run = shoal.parallelize(
        build("llama", SIZE, vocabulary=512, sequence=SEQUENCE),
        lambda p: build_optimizer(OptimizerPolicy(), p),
        batch=MICRO_BATCH * ACCUMULATE,
        micro_batch=MICRO_BATCH,
        precision="bf16",
        clip=1.0,
        world=world,
    )
    data = Tokens(512, SEQUENCE, samples=MICRO_BATCH * ACCUMULATE * (WARM_UP + 3 * STEPS + 1))
    batches = iter(run.loader(data))
    for _ in range(WARM_UP):
        run.step(next(batches))
    with sheet.row("the host waits once a step") as told:
        told["waits"] = waits(run, batches)
        assert sum(told["waits"].values()) <= WAITS_PER_STEP * STEPS, told["waits"]
    with sheet.row("a step") as told:
        told["step_s"], told["launched_s"] = step_seconds(run, batches)
    with sheet.row("kernels begin after their launch") as told:
        told.update(launches(run, batches))
        assert SMALL or told["begin_later"] >= BEGIN_LATER


def waits(run: shoal.Run, batches: Any) -> dict[str, int]:
    """Calls that wait for the device in some steps, by the line that Python was at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                run.step(next(batches))
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
    found = Counter(
        f"{Path(one.filename).name}:{one.lineno}"
        for one in caught
        if "synchronizing CUDA operation" in str(one.message)
    )
    return dict(found)


def step_seconds(run: shoal.Run, batches: Any) -> tuple[list[float], list[float]]:
    """Of some steps: seconds until the device has done all, and until the passes were launched."""
    step_s, launched_s = [], []
    for _ in range(STEPS):
        batch = next(batches)
        synchronize()
        began_s = time.perf_counter()
        run.forward_backward(batch)
        launched_s.append(time.perf_counter() - began_s)
        run.update()
        synchronize()
        step_s.append(time.perf_counter() - began_s)
    return step_s, launched_s


def launches(run: shoal.Run, batches: Any) -> dict[str, Any]:
    """Of the kernels of some steps, the share that began after its launch had returned."""
    synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(STEPS):
            run.step(next(batches))
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    host = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
    told = {
        "steps": STEPS,
        "host_ms": {e.key: [e.count, round(e.self_cpu_time_total / 1e3, 2)] for e in host[:25]},
    }
    return {**told, **begun(events)} if ON_GPU else told


def begun(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels by when they began, from a trace in microseconds, and how long the device worked.

    >>> launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 4}
    >>> kernel = {"cat": "kernel", "ts": 6, "dur": 2, "name": "k", "args": {"correlation": 1}}
    >>> begun([{**launch, "args": {"correlation": 1}}, kernel])["begin_later"]
    1.0
    """
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    ends = {one["args"]["correlation"]: one["ts"] + one["dur"] for one in calls}
    kernels = [one for one in events if one.get("cat") == "kernel"]
    known = [one for one in kernels if one["args"]["correlation"] in ends]
    later = sum(one["ts"] >= ends[one["args"]["correlation"]] for one in known)
    first, last = min(k["ts"] for k in kernels), max(k["ts"] + k["dur"] for k in kernels)
    names = Counter(one["name"] for one in calls)
    spent: Counter[str] = Counter()
    for kernel in kernels:
        spent[kernel["name"][:80]] += kernel["dur"]
    waiting = {name: count for name, count in names.items() if "ynchronize" in name}
    return {
        "kernels": len(kernels),
        "begin_later": later / len(known),
        "busy": sum(k["dur"] for k in kernels) / (last - first),
        "slowest_ms": {name: round(us / 1e3, 2) for name, us in spent.most_common(15)},
        "waiting_calls": waiting,
        "copies": dict(Counter(e["name"] for e in events if e.get("cat") == "gpu_memcpy")),
    }
