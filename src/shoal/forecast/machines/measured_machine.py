"""Stored measurements of this machine, read without torch, or rough defaults.

`shoal.machine.measure` writes one file per machine, torch version and number of processes. A plan
for the same machine reads it. Without a stored file the defaults below apply, and their source is
"not measured".

File      machines/KEY.json in the cache folder:
          {"version", "kind": cpu|gpu, "device", "processes", "local", "memory_bytes",
           "node_memory_bytes": of the whole host, absent in older files,
           "process_bytes", "matrix": {format: [[FLOP, FLOP/s], …]},
           "stream": [[bytes, bytes/s], …], "operation_s", "operation_backward_s",
           "disk_bytes_per_s", "host_bytes_per_s", "when": date,
           "links": {inside|across: {"ranks", all_reduce|reduce_scatter|all_gather:
                     {"latency_s", "bytes_per_s", "error"}}}}
          All of it per rank, while all ranks do the same.
Default   30 GFLOP/s fp32 per core (a server core with 8-wide products at half of its rate),
          8 GB/s per core up to 4 cores; gloo over loopback 30 µs and 1.5 GB/s: orders of magnitude
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Calibration, Cluster, Device, Link
from shoal.base.estimates.facts import MachineFacts, usable_cores
from shoal.forecast.machines.catalogue import get_device_model, network_link
from shoal.forecast.machines.refit_rates import correct_rates, read_corrections

VERSION = 1
NVIDIA_FOLDER = Path("/proc/driver/nvidia/gpus")

CORE_FLOPS_PER_S = {"fp64": 15e9, "fp32": 30e9, "bf16": 30e9, "fp16": 30e9}
CORE_STREAM_BYTES_PER_S = 8e9
STREAMING_CORES = 4
GLOO = Link("gloo over loopback", 3e-5, 1.5e9, "not measured: typical")
BETWEEN_MACHINES = network_link("eth", 1, 10.0, 1)
BUSY_WAIT_S, BUSY_BYTES = 6e-4, 2.7
"""In steps on busy cores a collective waits BUSY_WAIT_S longer, and takes BUSY_BYTES times as long
per byte, than in a loop: fitted to 32 runs on two cores (benchmarks/planner/at_hand.py)."""

PROCESS_BYTES = 0.4 * 2**30
"""Resident bytes of the interpreter and torch's libraries."""


def machine_path(cache: Path, processes: int, kind: str, threads: int = 0) -> Path:
    """Return the path of the file for this machine as measured with `processes` ranks.

    Reads and creates no file. The name has host, usable cores, torch version, processes and kind,
    and threads if they are not an equal share of the cores.

    Args:
        kind: cpu or gpu: the device of the ranks.
        threads: of a rank on a CPU; 0: as in a run, which obeys OMP_NUM_THREADS if set.
    """
    threads = threads or _threads_from_environment()
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    cores = usable_cores()
    key = f"{platform.node()}-{cores}-cores-torch-{torch_version}-{processes}-{kind}"
    if kind == "cpu" and threads not in (0, max(1, cores // processes)):
        key += f"-{threads}-threads"
    return cache / "machines" / f"{re.sub(r'[^A-Za-z0-9.+-]', '_', key)}.json"


def _threads_from_environment() -> int:
    """Return the threads per rank that the environment sets; 0: unset, a share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdecimal() else 0


def read_measured(cache: Path, processes: int, kind: str = "", threads: int = 0) -> Cluster | None:
    """Read this machine as measured with `processes` ranks; None without a readable file.

    The file's name has host name, usable cores and torch version. Later runs correct the matrix
    rates (`refit.learnt`).

    Args:
        cache: the cache folder.
        kind: cpu or gpu; "": the kind that has a file, GPUs first.
        threads: of a rank on a CPU; 0: as in a run (OMP_NUM_THREADS, else its share of cores).
    """
    for which in (kind,) if kind else ("gpu", "cpu"):
        try:
            path = machine_path(cache, processes, which, threads)
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["version"] == VERSION:
                return correct_rates(cluster_from_document(document), read_corrections(path))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            ArithmeticError,
        ):
            continue  # the next measurement replaces an unreadable file
    return None


def cluster_from_document(document: dict[str, Any]) -> Cluster:
    """Build the `Cluster` that a stored measurement describes (keys: head of this module).

    On a CPU the link inside a node is slower than measured, since ranks compute meanwhile.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError: not a stored measurement.
    """
    device = _device(document)
    local = int(document["local"])
    links = document["links"]
    near = links.get("inside") or links.get("across")
    far = links.get("across")
    inside = _make_link("within this machine", near) if near else GLOO
    if device.kind == "cpu":
        inside = _slow_down_link(inside)
    return Cluster(
        device=device,
        nodes=max(1, int(document["processes"]) // local),
        per_node=local,
        inside=inside,
        across=_make_link("between machines", far) if far else BETWEEN_MACHINES,
        calibration=Calibration(
            efficiency=_collective_slowdowns(near) if near else {},
            constants_s={
                "operation": float(document["operation_s"]),
                "operation_backward": float(document["operation_backward_s"]),
            },
            source=device.source,
        ),
        host_bytes_per_s=float(document["host_bytes_per_s"]),
        disk_bytes_per_s=float(document["disk_bytes_per_s"]),
        node_memory_bytes=float(document.get("node_memory_bytes", 0.0)),
        name="this machine",
    )


def _slow_down_link(link: Link) -> Link:
    """Return a link between ranks whose cores compute: messages and their bytes wait for a core."""
    return replace(
        link,
        latency_s=link.latency_s + BUSY_WAIT_S,
        bytes_per_s=link.bytes_per_s / BUSY_BYTES,
    )


def _device(document: dict[str, Any]) -> Device:
    matrix = {kind: _points(found) for kind, found in document["matrix"].items()}
    peaks = {kind: max(rate for _, rate in points) for kind, points in matrix.items()}
    ladders = {
        kind: tuple((flop, rate / peaks[kind]) for flop, rate in points)
        for kind, points in matrix.items()
    }
    stream = _points(document["stream"])
    return Device(
        name=str(document["device"]),
        memory_bytes=float(document["memory_bytes"]),
        matrix_flops_per_s=peaks,
        stream_bytes_per_s=stream[-1][1],
        ladder=ladders.get("fp32", ()),
        reserved_bytes=float(document["process_bytes"]),
        launch_s=float(document["operation_s"]),
        kind=str(document["kind"]),
        source=f"measured here, {document['processes']} processes, {document['when']}",
        ladders=ladders,
        stream_ladder=tuple(stream),
    )


def _points(found: list[list[float]]) -> list[tuple[float, float]]:
    points = sorted((float(size), float(rate)) for size, rate in found)
    if not points or min(rate for _, rate in points) <= 0:
        raise ValueError("a ladder without rates")
    return points


def _make_link(name: str, found: dict[str, Any]) -> Link:
    """Return the all-reduce's latency and rate, which gradients use."""
    one = found["all_reduce"]
    return Link(
        f"{name}, {found['ranks']} ranks",
        float(one["latency_s"]),
        float(one["bytes_per_s"]),
        f"measured all-reduce, {100 * float(one['error']):.0f} % off the straight line",
    )


def _collective_slowdowns(found: dict[str, Any]) -> dict[str, float]:
    """Return how much slower than the link's all-reduce each other collective is, as a factor.

    all_gather is a term of the step time (parameters); reduce_scatter is for other callers.
    """
    reference = float(found["all_reduce"]["bytes_per_s"])
    terms = {"parameters": "all_gather", "reduce_scatter": "reduce_scatter"}
    return {
        term: reference / float(found[kind]["bytes_per_s"])
        for term, kind in terms.items()
        if kind in found
    }


def estimate_this_machine(machine: MachineFacts, processes: int) -> Cluster:
    """Estimate this machine with `processes` ranks without a measurement: orders of magnitude.

    Args:
        machine: cores and memory, which the ranks share evenly. With GPUs the cores are ignored:
            one GPU per rank, from the catalogue's row of the driver's device (else an A100-80GB).

    Returns:
        A cluster of one node whose device's source is "not measured".

    >>> two = estimate_this_machine(MachineFacts(cores=4, memory_bytes=2**34, gpus=0), 2)
    >>> two.devices, two.device.matrix_flops_per_s["fp32"], two.device.source
    (2, 60000000000.0, 'not measured: typical server cores')
    """
    processes = max(1, processes)
    if machine.gpus:
        return replace(_gpu_cluster(processes), node_memory_bytes=machine.memory_bytes)
    share = machine.cores / processes
    stream = CORE_STREAM_BYTES_PER_S * min(machine.cores, STREAMING_CORES) / processes
    device = Device(
        name=f"{machine.cores} cores / {processes}" if processes > 1 else f"{machine.cores} cores",
        memory_bytes=machine.memory_bytes / processes,
        matrix_flops_per_s={kind: rate * share for kind, rate in CORE_FLOPS_PER_S.items()},
        stream_bytes_per_s=stream,
        ladder=((1e4, 0.05), (1e6, 0.3), (1e8, 0.8), (1e9, 1.0)),
        reserved_bytes=PROCESS_BYTES,
        launch_s=4e-6,
        kind="cpu",
        source="not measured: typical server cores",
    )
    return Cluster(
        device=device,
        nodes=1,
        per_node=processes,
        inside=GLOO,
        across=BETWEEN_MACHINES,
        host_bytes_per_s=8e9,
        disk_bytes_per_s=3e8,
        name="this machine",
        node_memory_bytes=machine.memory_bytes,
    )


def _gpu_cluster(processes: int) -> Cluster:
    named = _gpu_name()
    try:
        model = get_device_model(named or "A100-80GB")
        source = f"not measured: as the catalogue says of {model.device.name}"
    except PlanError:
        model = get_device_model("A100-80GB")
        source = f"not measured: {named} is not in the catalogue, taken for an A100-80GB"
    kind, cards, gbit_per_s = model.network
    return Cluster(
        device=replace(model.device, source=source),
        nodes=1,
        per_node=processes,
        inside=model.inside_link,
        across=network_link(kind, cards, gbit_per_s, processes),
        host_bytes_per_s=model.host_bytes_per_s,
        disk_bytes_per_s=1e9,
        name="this machine",
    )


def _gpu_name(folder: Path = NVIDIA_FOLDER) -> str:
    """Return the name of the first GPU from NVIDIA's driver; "" if it has none."""
    try:
        for told in sorted(folder.glob("*/information")):
            for line in told.read_text(encoding="utf-8").splitlines():
                if line.startswith("Model:"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return ""
    return ""
