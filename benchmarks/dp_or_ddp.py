"""`dp` in one process against `ddp` over as many: step times on cores, bytes and memory on devices.

    python benchmarks/dp_or_ddp.py --quick     does it all work? under a minute
    python benchmarks/dp_or_ddp.py             100 pairs per model; use a machine that is idle

Times   two threads of one process (`dp`) against two processes (`ddp`), one torch thread each, on
        two cores: one step of each, one right after the other, in alternating order, between
        barriers; the slowest rank counts. A/A: two `ddp` programs. CPU: the same in processor
        seconds of all. Models: many small operations, where the interpreter counts, and few large.
Counts  on simulated devices (tests/simgpu), so of bytes and memory alone, never of time: what one
        step copies between the devices of one process, or sends between processes; the most that
        tensors hold on each device; operations that one interpreter launches. fp32, AdamW, a Llama.

Writes benchmarks/results/dp-or-ddp-DATE.json with every raw time and the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import machine, run_together
from ratios import Ratio, ratio

HERE = Path(__file__).resolve().parent
SIMULATED = HERE.parent / "tests" / "simgpu"
WARM_UP, NOISE_LIMIT = 4, 0.02
MODELS: dict[str, dict[str, int]] = {
    "small operations": {"dim": 64, "layers": 6, "heads": 4, "sequence": 32, "batch": 8},
    "large operations": {"dim": 384, "layers": 2, "heads": 6, "sequence": 256, "batch": 4},
}
COUNTED = {"dim": 256, "layers": 2, "heads": 4, "sequence": 64, "batch": 8}
VOCABULARY, MICRO_BATCH = 256, 1
PAIRS = (("dp", "ddp"), ("ddp", "ddp again"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("--pairs", type=int, default=100, help="timed pairs per comparison")
    options.add_argument("--quick", action="store_true", help="4 pairs, nothing written")
    options.add_argument("--no-times", action="store_true", help="bytes and memory alone")
    options.add_argument("--out", help="where the JSON goes")
    asked = options.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/dp_or_ddp.py", *sys.argv[1:]]),
        "machine": machine(),
        "times": {},
        "counts": [],
    }
    for name in () if asked.no_times else MODELS:
        job = {"model": name, "pairs": 4 if asked.quick else asked.pairs}
        record["times"][name] = told = _told(job, 2)
        told["rows"] = [_row(name, told["steps"], *pair) for pair in PAIRS]
    for devices in (2, 4):
        for layout in ("dp", "ddp"):
            row = _told({"layout": layout, "devices": devices}, 1 if layout == "dp" else devices)
            record["counts"].append(row)
            peaks = " ".join(f"{peak / 2**20:.1f}" for peak in row["peak_bytes"])
            print(
                f"{layout} on {devices} simulated devices: {row['sent_bytes'] / 2**20:.1f} MiB a "
                f"step, peaks {peaks} MiB, {row['launches']} launches in one process"
            )
    if asked.quick and not asked.out:
        return
    name = f"dp-or-ddp-{time.strftime('%Y%m%d')}.json"
    path = Path(asked.out) if asked.out else HERE / "results" / name
    path.write_text(json.dumps(record) + "\n")
    print(f"raw times and machine: {path}")


def _told(job: dict[str, Any], processes: int) -> dict[str, Any]:
    """What the first rank of a world of this file measured."""
    kept = dict(os.environ)
    if "devices" in job:
        sys.path.insert(0, str(SIMULATED))
        from simulated.build import library

        os.environ |= {"SIM_LIBRARY": str(library()), "SIM_DEVICES": str(job["devices"])}
        os.environ["PYTHONPATH"] = f"{SIMULATED / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "told.json"
            words = [str(HERE / "dp_or_ddp.py"), json.dumps({**job, "out": str(out)})]
            run_together(words, processes, deadline_s=3600)
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _row(model: str, steps: dict[str, list[dict[str, float]]], ours: str, theirs: str) -> Any:
    """One comparison, printed and kept: ratios of wall and of processor seconds."""
    pair = f"{ours} / {theirs}"
    both = [[one[name] for one in steps[pair]] for name in ("ours_s", "theirs_s")]
    cpu = [[one[name] for one in steps[pair]] for name in ("ours_cpu_s", "theirs_cpu_s")]
    wall, work = ratio(*both), ratio(*cpu)
    medians = [1000 * statistics.median(one) for one in both]
    noisy = "" if wall.half_width <= NOISE_LIMIT else f", ± {wall.half_width:.1%}"
    print(
        f"{model}: {pair}: {_text(wall)} of {len(both[0])} pairs ({medians[0]:.1f} and "
        f"{medians[1]:.1f} ms{noisy}); CPU {_text(work)}"
    )
    return {"pair": pair, "wall": asdict(wall), "cpu": asdict(work), "median_ms": medians}


def _text(found: Ratio) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


# ---- one rank ----------------------------------------------------------------------------------
def work(job: dict[str, Any]) -> None:
    """A rank of a measurement; the first one writes what was found."""
    import torch

    from shoal.fabric import start_world

    torch.set_num_threads(1)
    world = start_world() if int(os.environ["WORLD_SIZE"]) > 1 else start_world({})
    found = _counts(job, world) if "devices" in job else _times(job, world)
    if world.is_first:
        Path(job["out"]).write_text(json.dumps(found))
    world.close()


def _run(layout: Any, world: Any, shape: dict[str, int]) -> Any:
    import torch

    import shoal
    from shoal.models.catalog import build

    sizes = {key: shape[key] for key in ("dim", "layers", "heads")}
    make = functools.partial(
        build, "llama", {**sizes, "dropout": 0.0}, vocabulary=VOCABULARY, sequence=shape["sequence"]
    )
    return shoal.parallelize(
        make,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        layout=layout,
        batch=shape["batch"],
        micro_batch=MICRO_BATCH,
        precision="fp32",
        seed=1,
        world=world,
    )


def _share(shape: dict[str, int], step: int, rank: int, ranks: int) -> Any:
    """A rank's micro-batches of a step, as a layout deals them: one in `ranks`."""
    import torch

    size = (shape["batch"], shape["sequence"] + 1)
    rows = torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(step))
    own = rows[rank::ranks]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _times(job: dict[str, Any], world: Any) -> dict[str, Any]:
    from shoal.fabric import World
    from shoal.fabric.device import HOST
    from shoal.fabric.rendezvous.process_info import ProcessInfo

    shape = MODELS[job["model"]]
    runs: dict[str, Any] = {name: _run("ddp", world, shape) for name in ("ddp", "ddp again")}
    if world.is_first:
        runs["dp"] = _run({"threads": world.size}, World(ProcessInfo(), HOST, None), shape)
    done: dict[str, list[float]] = {name: [] for name in ("dp", "ddp", "ddp again")}

    def step(name: str) -> tuple[float, float]:
        """(seconds of the slowest rank, processor seconds of all)."""
        import torch

        index = len(done[name])
        alone = name == "dp"
        batch = _share(shape, index, 0 if alone else world.rank, 1 if alone else world.size)
        world.barrier()
        before_s, used_s = time.perf_counter(), time.process_time()
        done[name].append(float(runs[name].step(batch).loss) if name in runs else 0.0)
        took_s = 0.0 if alone and not world.is_first else time.perf_counter() - before_s
        told = torch.tensor([took_s, time.process_time() - used_s], dtype=torch.float64)
        every = world.all_gather(told)
        return float(every[:, 0].max()), float(every[:, 1].sum())

    for _ in range(WARM_UP):
        for name in done:
            step(name)
    steps: dict[str, list[dict[str, float]]] = {f"{a} / {b}": [] for a, b in PAIRS}
    for turn in range(job["pairs"]):
        for ours, theirs in PAIRS:
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            took = {name: step(name) for name in order}
            (ours_s, ours_cpu_s), (theirs_s, theirs_cpu_s) = took[ours], took[theirs]
            steps[f"{ours} / {theirs}"].append(
                {
                    "ours_s": ours_s,
                    "theirs_s": theirs_s,
                    "ours_cpu_s": ours_cpu_s,
                    "theirs_cpu_s": theirs_cpu_s,
                }
            )
    if world.is_first:
        for one, other in zip(done["dp"], done["ddp"], strict=False):
            if abs(one - other) > 1e-3 * abs(other):
                raise RuntimeError(f"dp and ddp differ: {one} and {other}")
    parameters = sum(p.numel() for p in runs["ddp"].model.parameters())
    return {"shape": shape, "parameters": parameters, "losses": done, "steps": steps}


def _counts(job: dict[str, Any], world: Any) -> dict[str, Any]:
    import simulated_cuda
    import torch

    devices, layout = job["devices"], job["layout"]
    own = {"threads": devices} if layout == "dp" else "ddp"
    run = _run(own, world, COUNTED)
    traffic, mine = run.world.traffic, range(devices) if layout == "dp" else [world.rank]
    traffic.take = lambda: ({}, 0.0)  # the row of metrics.jsonl would take it
    for step in range(3):
        traffic.sent_bytes.clear()
        before = simulated_cuda.launches()[0]
        for device in mine:
            torch.cuda.reset_peak_memory_stats(device)
        run.step(_share(COUNTED, step, world.rank, world.size))
    launches = simulated_cuda.launches()[0] - before
    peaks = [torch.cuda.max_memory_allocated(device) for device in mine]
    told = [peaks, sum(traffic.sent_bytes.values()), dict(traffic.sent_bytes), launches]
    every = world.gather_json(told)
    return {
        "layout": layout,
        "devices": devices,
        "shape": COUNTED,
        "weights_bytes": 4 * sum(p.numel() for p in run.model.parameters()),
        "peak_bytes": [peak for one in every for peak in one[0]],
        "sent_bytes": max(one[1] for one in every),
        "sent_by_kind": every[0][2],
        "launches": max(one[3] for one in every),
    }


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        main()
