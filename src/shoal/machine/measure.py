"""Measure this machine in under a minute: the rates that predictions use.

All ranks do the same work at the same moment, since they share cores, memory and disk. A rate is
the mean over ranks of the best round, since other programs disturb the rest. They may disturb whole
seconds, so the full list runs several times, and the best of each number counts.

    matrix      forward and backward products of one linear layer, by format and size: 6·n³ FLOP
    stream      sums of two tensors into a new one, by size: three passes (caches show here)
    operation   one tiny operation, forward with its graph, and backward: the fixed cost of a launch
    links       see link_rates.py · host  copies between device and host memory
    disk        bytes written and synced, by all ranks at once
    process     memory of a process before training: interpreter, libraries, a GPU's context

forecast/machines/measured_machine.py documents the stored file, and reads it without torch.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.base.estimates.facts import usable_cores
from shoal.base.runlog.atomic_files import write_atomically
from shoal.fabric import World
from shoal.fabric.device import (
    device_name,
    empty_cache,
    get_device_capabilities,
    is_accelerator,
    non_torch_bytes,
    synchronize,
    total_bytes,
)
from shoal.forecast.machines.measured_machine import VERSION, cluster_from_document, machine_path
from shoal.machine.link_rates import measure_links, merge_links
from shoal.wire.phases import phase

LONGEST_S = 0.6
FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
GPU_FORMATS = {**FORMATS, "fp16": torch.float16}
CHAIN = 64


@dataclass(frozen=True)
class MeasurementSizes:
    """Sizes and rounds of a measurement: sides of square matrices, bytes of tensors and files.

    Attributes:
        rounds: rounds per rate, of which the best counts.
        rate_s: seconds of all rounds of a rate together.
        passes: repetitions of the whole list.
    """

    products: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    tensor_bytes: tuple[int, ...] = (2**14, 2**17, 2**20, 2**22, 2**24, 2**26)
    message_bytes: tuple[int, ...] = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
    file_bytes: int = 2**26
    rounds: int = 5
    rate_s: float = 0.1
    passes: int = 3


FULL = MeasurementSizes()
QUICK = MeasurementSizes(
    (64, 256, 1024), (2**17, 2**22, 2**25), (2**12, 2**18, 2**22), 2**24, 3, 0.05, 1
)
"""Sizes of a first run, which spends a second; `shoal plan --measure` takes the full list. Rates of
60 ms were as high, and varied as little, as those of 100 ms (2 processes on a Xeon, 8 turns)."""
GPU = MeasurementSizes(
    products=(256, 512, 1024, 2048, 4096, 8192), tensor_bytes=(2**20, 2**24, 2**28)
)
GPU_QUICK = replace(
    QUICK, products=(256, 1024, 2048, 4096, 8192), tensor_bytes=(2**20, 2**24, 2**26)
)
"""In bf16 an H200's products of 1024 × 1024 reach 46 TFLOP/s, those of 8192 × 8192 800: from the
former Shoal predicted 0.58 s for a step of 0.12 s."""


def quick_sizes(device: torch.device) -> MeasurementSizes:
    """Return the sizes for a first run, which takes a second, by the kind of its device."""
    return GPU_QUICK if is_accelerator(device) else QUICK


def measure_machine(
    world: World, cache: Path, sizes: MeasurementSizes | None = None, *, again: bool = False
) -> dict[str, Any]:
    """Measure this machine with these ranks, or read the cached result, as one JSON document.

    A collective, with the same result on every rank. It measures matrix products, memory, single
    operations, links, host copies and disk.

    Args:
        cache: folder where rank 0 keeps the document; an existing one is returned at once.
        sizes: sizes to try; None: a list that takes less than a minute.
        again: measure and overwrite an existing document.
    """
    kind = "gpu" if is_accelerator(world.device) else "cpu"
    path = machine_path(cache, world.size, kind, torch.get_num_threads())
    known = None if again else world.broadcast_json(_read(path) if world.is_first else None)
    if known:
        return dict(known)
    if sizes is None:
        sizes = GPU if is_accelerator(world.device) else FULL
    held_bytes = _process_bytes(world.device)
    local = world.local_size if world.size % world.local_size == 0 else world.size
    document: dict[str, Any] = {
        "version": VERSION,
        "kind": "gpu" if is_accelerator(world.device) else "cpu",
        "device": _device_name(world),
        "processes": world.size,
        "local": local,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d"),
        "memory_bytes": _memory_bytes(world.device) / (local if world.device.type == "cpu" else 1),
        "node_memory_bytes": _memory_bytes(torch.device("cpu")),
        "process_bytes": _mean(world, held_bytes),
        **best_rates([_rates(world, cache, local, sizes) for _ in range(sizes.passes)]),
    }
    if is_accelerator(world.device):
        empty_cache()  # frees the largest products' memory before the run
    told: dict[str, Any] = world.broadcast_json(document)
    if world.is_first:
        _write(path, told)
    return told


@phase("measure the machine")
def _rates(world: World, cache: Path, local: int, sizes: MeasurementSizes) -> dict[str, Any]:
    """Measure one pass of all rates and seconds of the document."""
    ahead_s, back_s = _measure_operation(world, sizes)
    axes = {"across": world.size // local, "inside": local}
    return {
        "matrix": {kind: _measure_products(world, dtype, sizes) for kind, dtype in _formats(world)},
        "stream": [[size, _measure_stream(world, size, sizes)] for size in sizes.tensor_bytes],
        "host_bytes_per_s": _measure_host_copy(world, sizes),
        "links": measure_links(world, axes, sizes.message_bytes),
        "disk_bytes_per_s": local * _measure_disk(world, cache, sizes),
        "operation_s": ahead_s,
        "operation_backward_s": back_s,
    }


def best_rates(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the best of every number over all passes; a pass may lack some sizes."""
    return {
        "matrix": {
            kind: _fastest_by_size([passed["matrix"][kind] for passed in passes])
            for kind in passes[0]["matrix"]
        },
        "stream": _fastest_by_size([passed["stream"] for passed in passes]),
        "links": merge_links([passed["links"] for passed in passes]),
        **{name: max(p[name] for p in passes) for name in ("host_bytes_per_s", "disk_bytes_per_s")},
        **{name: min(p[name] for p in passes) for name in ("operation_s", "operation_backward_s")},
    }


def _fastest_by_size(ladders: Sequence[list[list[float]]]) -> list[list[float]]:
    """Return [size, rate] by size, with the highest rate of each size."""
    found: dict[float, float] = {}
    for size, rate in (point for ladder in ladders for point in ladder):
        found[size] = max(rate, found.get(size, 0.0))
    return [[size, rate] for size, rate in sorted(found.items())]


def _formats(world: World) -> list[tuple[str, torch.dtype]]:
    """Return the number formats to measure: none of fp16 on a CPU, which trains it in fp32."""
    return list((GPU_FORMATS if is_accelerator(world.device) else FORMATS).items())


def _mean(world: World, number: float) -> float:
    return statistics.fmean(world.gather_json(number))


def _measure_rate(
    world: World, work: Callable[[], object], amount: float, sizes: MeasurementSizes
) -> float:
    """Return the amount per second of one rank while all ranks work: mean of their best rounds."""
    work()
    _pause(world)
    began_s = time.perf_counter()
    work()
    _pause(world)
    once_s = time.perf_counter() - began_s
    times = max(1, min(1000, int(sizes.rate_s / sizes.rounds / max(once_s, 1e-7))))
    world.barrier()
    taken: list[float] = []
    for _ in range(sizes.rounds):
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        _pause(world)
        taken.append((time.perf_counter() - began_s) / times)
    return _mean(world, amount / max(min(taken), 1e-9))


def _pause(world: World) -> None:
    synchronize(world.device)


def _measure_products(
    world: World, dtype: torch.dtype, sizes: MeasurementSizes
) -> list[list[float]]:
    """Measure [FLOP of one matrix product, FLOP/s] by size, within limits of time and memory."""
    points: list[list[float]] = []
    room_bytes = _memory_bytes(world.device) / 4 / world.local_size
    for side in sizes.products:
        flop = 2.0 * side**3
        needed_bytes = 6 * side**2 * max(4, dtype.itemsize)
        if points and (3 * flop / points[-1][1] > LONGEST_S or needed_bytes > room_bytes):
            break
        x, weight, upstream = (
            torch.rand(side, side, device=world.device).to(dtype) for _ in range(3)
        )

        def layer(
            x: torch.Tensor = x, w: torch.Tensor = weight, g: torch.Tensor = upstream
        ) -> None:
            x @ w.T
            g @ w
            g.T @ x

        points.append([flop, _measure_rate(world, layer, 3 * flop, sizes)])
    return points


def _measure_stream(world: World, size_bytes: int, sizes: MeasurementSizes) -> float:
    left = torch.zeros(size_bytes // 4, device=world.device)
    right = torch.ones(size_bytes // 4, device=world.device)
    return _measure_rate(world, lambda: torch.add(left, right), 3.0 * size_bytes, sizes)


def _measure_operation(world: World, sizes: MeasurementSizes) -> tuple[float, float]:
    """Measure the seconds of one tiny operation: forward with its graph, backward."""
    start = torch.ones(1, device=world.device, requires_grad=True)
    ahead: list[float] = []
    back: list[float] = []
    world.barrier()
    for _ in range(1 + 10 * sizes.rounds):
        value, began_s = start, time.perf_counter()
        for _ in range(CHAIN):
            value = value * 1.0
        _pause(world)
        half_s = time.perf_counter()
        value.backward()
        _pause(world)
        ahead.append((half_s - began_s) / CHAIN)
        back.append((time.perf_counter() - half_s) / CHAIN)
    return _mean(world, min(ahead[1:])), _mean(world, min(back[1:]))


def _measure_host_copy(world: World, sizes: MeasurementSizes) -> float:
    size = max(sizes.tensor_bytes)
    host = torch.zeros(size // 4, pin_memory=get_device_capabilities(world.device).pinned)
    there = torch.zeros(size // 4, device=world.device)
    return _measure_rate(world, lambda: there.copy_(host), size, sizes)


def _measure_disk(world: World, cache: Path, sizes: MeasurementSizes) -> float:
    """Measure the bytes per second that one rank writes; 0 if the cache folder is not writable."""
    world.barrier()
    try:
        rate = write_bytes_per_s(cache, sizes.file_bytes)
    except OSError:
        rate = 0.0
    return _mean(world, rate)


def _device_name(world: World) -> str:
    if is_accelerator(world.device):
        return device_name(world.device)
    cores = usable_cores()
    return f"{_cpu_name()}, {cores} cores / {world.local_size}"


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        names = [
            line
            for line in cpuinfo.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        return names[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if is_accelerator(device):
        return total_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _process_bytes(device: torch.device, status: Path = Path("/proc/self/status")) -> int:
    """Return the resident bytes of this process; on a GPU its memory outside of tensors."""
    if is_accelerator(device):
        return non_torch_bytes(device)
    try:
        lines = [
            line
            for line in status.read_text(encoding="utf-8").splitlines()
            if line.startswith("VmRSS:")
        ]
        return int(lines[0].split()[1]) * 1024
    except (OSError, IndexError):
        return 0


def _read(path: Path) -> dict[str, Any] | None:
    """Read the stored document; None if no plan could use it."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cluster_from_document(document)
        return document if document["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError):
        return None


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document, indent=1))
    except OSError:
        return  # an unwritable cache costs only the next measurement


CHUNK_BYTES = 4 * 2**20


def write_bytes_per_s(folder: Path, size_bytes: int) -> float:
    """Return the rate of writing and syncing one new file in a folder, and remove the file.

    Raises:
        OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunk = os.urandom(min(CHUNK_BYTES, size_bytes))  # random, since a drive may compress
    with tempfile.TemporaryFile(dir=folder) as file:
        began_s = time.perf_counter()
        written = 0
        while written < size_bytes:
            written += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - began_s)
