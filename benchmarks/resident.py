"""Resident memory and step time of Shoal's layouts on a CPU, beside DDP and FSDP2 by hand.

    python benchmarks/resident.py [--programs ddp,fsdp2,shoal-ddp,shoal-fsdp] [--dims 2048]
                                  [--rounds 2] [--json FILE]

Every program trains the same chain of 12 layers (dim × dim, ReLU) on 2 processes of one thread,
8 samples each, AdamW, clipping; a run is two fresh processes, and programs take turns. Memory is
what is resident after the last step, and the kernel's peak, above what was resident before the
model was built; a step's time is the median of the later steps on the slower rank. `parse_cpu` is
processor time of both, user and kernel. Linux only (/proc).

`NAME=VALUE+NAME=VALUE@program` runs a program with variables of the environment, for instance
`MALLOC_MMAP_THRESHOLD_=33554432@shoal-fsdp`; `tree:PATH@program` takes Shoal's source from there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import SOURCE, machine, run_together
from torch import nn

PROGRAMS = "ddp,fsdp2,shoal-ddp,shoal-fsdp"
LAYERS, SAMPLES, RATE, CLIP = 12, 8, 1e-4, 1.0
WARM, STEPS, DEADLINE_S = 3, 12, 300.0
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--programs", default=PROGRAMS)
    parser.add_argument("--dims", default="2048", help="2048 has 50M weights; 512 3.1M; 2520 76M")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="keep every figure in this file")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _one_rank(options.rank_of[0], int(options.rank_of[1]), Path(options.rank_of[2]))
        return
    rows = []
    for dim in map(int, options.dims.split(",")):
        programs = options.programs.split(",")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name in programs:
                found[name].append(_run(name, dim))
        for name, runs in found.items():
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"dim": dim, "program": name, "runs": runs, **row})
            print(
                f"{dim:5} {name:40} resident {row['resident_mib']:6.0f}  peak "
                f"{row['peak_mib']:6.0f} MiB  step {row['step_s'] * 1e3:7.1f} ms"
                f"  cpu {row['cpu_s'] * 1e3:7.1f} ms"
                f"  faults {row['faults']:8.0f}",
                flush=True,
            )
    if options.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _run(name: str, dim: int) -> dict[str, float]:
    """Run a program once on two processes; gives its figures: the larger rank's, times summed."""
    words, _, program = name.rpartition("@")
    before = dict(os.environ)
    for word in filter(None, words.split("+")):
        if word.startswith("tree:"):
            source = str(Path(word[5:]) / "src")
            os.environ["SHOAL_TREE"] = source
        else:
            key, _, value = word.partition("=")
            os.environ[key] = value
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [str(Path(__file__).resolve()), "--rank-of", program, str(dim), folder]
            run_together(arguments, 2, deadline_s=DEADLINE_S)
            ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    finally:
        os.environ.clear()
        os.environ.update(before)
    largest = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return {**largest, "cpu_s": sum(rank["cpu_s"] for rank in ranks)}


def _one_rank(program: str, dim: int, folder: Path) -> None:
    """Train, measure, and write this rank's figures."""
    torch.set_num_threads(1)
    if program.startswith("shoal"):
        if tree := os.environ.get("SHOAL_TREE"):
            sys.path[:] = [tree, *(path for path in sys.path if Path(path) != SOURCE)]
        import shoal  # noqa: F401
    torch.manual_seed(0)
    before = _status("VmRSS")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(LAYERS)])
    torch.manual_seed(int(os.environ["RANK"]))
    x = torch.randn(SAMPLES, dim)
    step, close = _program(program, model, x)
    walls, cpus, faults = [], [], []
    for _ in range(WARM + STEPS):
        used, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step()
        walls.append(time.perf_counter() - began_s)
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpus.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
        faults.append(now.ru_minflt - used.ru_minflt)
    figures = {
        "resident_mib": _status("VmRSS") - before,
        "peak_mib": _status("VmHWM") - before,
        "step_s": statistics.median(walls[WARM:]),
        "cpu_s": statistics.median(cpus[WARM:]),
        "faults": statistics.median(faults[WARM:]),
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
    close()


def _program(name: str, model: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """A step of a program, and how it ends."""
    criterion = nn.MSELoss()
    if name.startswith("shoal"):
        import shoal

        run = shoal.parallelize(
            model,
            torch.optim.AdamW(model.parameters(), lr=RATE),
            shoal.mean_of_samples(criterion),
            name.partition("-")[2],
            micro_batch=SAMPLES,
            clip=CLIP,
        )
        return lambda: run.step((x, x)), run.close
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    if name == "ddp":
        wrap = nn.parallel.DistributedDataParallel
        trained: nn.Module = wrap(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for block in model:
            fully_shard(block, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        criterion(trained(x), x).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()

    def close() -> None:
        dist.barrier()
        dist.destroy_process_group()

    return step, close


def _status(key: str) -> float:
    """A figure of this process in MiB (/proc/self/status)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell {key}")


if __name__ == "__main__":
    main()
