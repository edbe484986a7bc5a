"""Foreseen beside measured memory on simulated devices: layouts × models × offload × reshard.

Two processes (four for hsdp and for fsdp in a pipeline), each with a device under the name `cuda`
that counts its memory as CUDA's allocator does (tests/simgpu; no GPU is needed, none is tested). A
row begins with a function that builds the model and takes three steps; the most that the allocator
held at any instant is put beside the most that is foreseen over all instants, without what lies
outside the allocator.

    SIM_LIBRARY=$(python tests/simgpu/simulated/build.py) \\
    PYTHONPATH=tests/simgpu/site:src python benchmarks/planner/devices.py

Writes benchmarks/planner/results/devices.json. Gate: within 8 % in every row. `--limits` trains
under limits of the devices' memory instead, one world each (devices-limits.json): what "fits" must
live, and of what is called "no" a tenth at most. "tight" may do either, and says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from processes import machine, run_together  # noqa: E402

sys.path.insert(0, str(HERE.parents[1] / "tests" / "proof"))
from source import source_hash  # noqa: E402

import shoal  # noqa: E402
from shoal.base.errors import ShoalError  # noqa: E402
from shoal.base.estimates.cluster import Cluster, Device, Link  # noqa: E402
from shoal.base.estimates.estimate import ModelFacts, PlanningCase  # noqa: E402
from shoal.base.layouts.layout import Layout  # noqa: E402
from shoal.base.plans.plan import Plan  # noqa: E402
from shoal.fabric import start_world  # noqa: E402
from shoal.forecast.fit.memory_fit import judge_memory  # noqa: E402
from shoal.forecast.fit.memory_instants import predict_run  # noqa: E402
from shoal.forecast.fit.peak_memory import predict_memory  # noqa: E402
from shoal.forecast.memory.framework_memory import framework_memory  # noqa: E402
from shoal.models.catalog import build  # noqa: E402
from shoal.models.loss import token_loss  # noqa: E402
from shoal.trace.costs.gpu_kernels import GpuKernelMode  # noqa: E402
from shoal.trace.costs.traced_facts import trace_facts  # noqa: E402

GATE, PROCESSES, DEADLINE_S, STEPS = 0.08, 2, 1500, 3
SEQUENCE, VOCABULARY, ROWS, ROUNDS = 64, 2048, 2, 2
LINK = Link("wire", 1e-6, 1e9)
HABITS = replace(
    framework_memory("shoal"), workspace_bytes=0.0
)  # no library has any on these devices
MEMORY_BYTES = 256 * 2**20
"""Of a device: small ones stream the optimizer's state in pieces of 4 MiB."""
DEVICE = Device("simulated", MEMORY_BYTES, {"fp32": 1e12, "fp64": 1e12}, 1e11, kind="gpu")


class Block(nn.Module):
    """Two layers and what is added to them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(width: int = 384, inner: int = 1536, depth: int = 5) -> nn.Module:
    """Equal blocks between two layers."""
    middle = [Block(width, inner) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, width), nn.Sequential(*middle), nn.Linear(width, 16))


def deep() -> nn.Module:
    """Narrower ones, and more of them."""
    return blocks(256, 1024, 10)


def wide() -> nn.Module:
    """Layers in a row: nothing repeats that fsdp could gather apart."""
    return nn.Sequential(
        *(nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU()),
        *(nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 16)),
    )


def llama(**more: Any) -> nn.Module:
    """Shoal's own."""
    given = {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 4, **more}
    return build("llama", given, vocabulary=VOCABULARY, sequence=SEQUENCE)


def gpt() -> nn.Module:
    """Shoal's GPT."""
    given = {"dim": 256, "layers": 6, "heads": 4}
    return build("gpt", given, vocabulary=VOCABULARY, sequence=SEQUENCE)


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a language model."""
    drawn = torch.randint(0, VOCABULARY, (count, SEQUENCE))
    return drawn, drawn


def numbers(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the others."""
    return torch.randn(count, 64), torch.randn(count, 16)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss per element."""
    return (outputs - targets) ** 2


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (llama, tokens, token_loss),
    "gpt": (gpt, tokens, token_loss),
    "blocks": (blocks, numbers, squares),
    "wide": (wide, numbers, squares),
    "deep": (deep, numbers, squares),
}
PLAIN: tuple[Any, ...] = ("ddp", "zero1", "zero2", "fsdp", {"tp": 2}, {"pp": 2})
PARKED, PIPED = {"offload": "parameters"}, {"dp_shard": 2, "pp": 2, "zero": 3}
MATRIX: list[tuple[str, Any, dict[str, str]]] = [
    *((model, layout, {}) for model in MODELS for layout in PLAIN),
    *((model, "fsdp", {"reshard": "no"}) for model in ("llama", "gpt", "blocks", "deep")),
    *(
        (model, layout, {"offload": "optimizer"})
        for model in ("llama", "blocks", "wide")
        for layout in ("ddp", "zero1", "fsdp", {"tp": 2})
    ),
    *((model, "fsdp", PARKED) for model in ("llama", "gpt", "blocks")),
    *((model, "fsdp", {"recompute": "full"}) for model in ("llama", "blocks")),
    *((model, "ddp", {"recompute": "full"}) for model in ("llama", "gpt")),
]
LARGER: list[tuple[str, Any, dict[str, str]]] = [
    *((model, "hsdp", policies) for model in ("gpt", "deep") for policies in ({}, PARKED)),
    *((model, PIPED, {}) for model in ("llama", "gpt", "deep")),
]
ROWS_OF = {PROCESSES: MATRIX, 2 * PROCESSES: LARGER}


def facts(make: Any, inputs: Tensor, loss: Any, targets: Tensor) -> ModelFacts:
    """What a model keeps on these devices: torch's own operations, no kernels that fuse them."""

    def as_it_is(_mode: Any, func: Any, _types: Any, given: Any = (), more: Any = None) -> Any:
        return func(*given, **(more or {}))

    with patch.object(GpuKernelMode, "__torch_function__", as_it_is):
        return trace_facts(make, (inputs,), kernels="gpu", loss=loss, targets=targets)


def started(world: Any, name: str, layout: Any, batch: int, **policies: str) -> Any:
    """A run of a model from its builder."""
    make, data, loss = MODELS[name]
    return shoal.parallelize(
        make,
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        loss,
        layout=layout,
        **{"batch": batch, "micro_batch": ROWS, "precision": "fp32"},
        **{"sample": data(ROWS), "world": world, **policies},
    )


def take_steps(run: Any, data: Any) -> None:
    """Three steps, to their end on the device."""
    torch.manual_seed(run.program.data.rank)
    batch = data(ROUNDS * ROWS)
    for _ in range(STEPS):
        run.step(batch)
    torch.cuda.synchronize(run.program.world.device)


def row(world: Any, name: str, layout: Any, policies: dict[str, str]) -> dict[str, Any]:
    """One row of this rank: what it held, and what was foreseen."""
    import simulated_cuda

    make, data, loss = MODELS[name]
    simulated_cuda.set_limit(world.device.index or 0, MEMORY_BYTES)
    torch.manual_seed(0)
    inputs, targets = data(2)
    known = facts(make, inputs, loss, targets)
    gc.collect()
    torch.cuda.synchronize(world.device)
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    parts = layout.get("dp_shard", 1) if isinstance(layout, dict) else world.size
    run = started(world, name, layout, ROUNDS * ROWS * parts, **policies)
    torch.cuda.synchronize(world.device)
    start = torch.cuda.max_memory_allocated(world.device) - base
    take_steps(run, data)
    held = torch.cuda.max_memory_allocated(world.device) - base
    reserved = torch.cuda.max_memory_reserved(world.device)
    case = PlanningCase(
        known,
        Cluster(DEVICE, 1, world.size, LINK, LINK),
        run.plan,
        loss="chunked" if name in ("llama", "gpt") else "full",
    )
    stage = run.program.pipe.rank
    step = predict_memory(case, stage, HABITS)
    told = {one.name: one.device_bytes for one in predict_run(case, HABITS).instants}
    building = max(told.get("checking", 0.0), told["building"])
    for undo in run.program.on_close:
        undo()
    return {
        "held": held,
        "start": start,
        "reserved": reserved,
        "foreseen_step": step.allocated_bytes,
        "foreseen_start": building,
        "parts": step.parts,
        "when": step.when,
        "parameters": run.plan.parameters,
    }


LAYOUTS = {
    "ddp": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "fsdp": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2, schedule="1f1b"),
}
LIMITS = ("far", "low", "peak", "high")
"""Limits of the devices: 0.75 of the foreseen peak, just below and at the middle of its interval,
and its upper end, the least that "fits"."""


def limited(name: str, kind: str, where: str, out: Path) -> None:
    """Train under a limit of the device's memory; the verdict is written before it begins."""
    import simulated_cuda

    torch.set_num_threads(1)
    world = start_world()
    make, data, loss = MODELS[name]
    torch.manual_seed(0)
    inputs, targets = data(2)
    known = facts(make, inputs, loss, targets)
    layout = LAYOUTS[kind]
    plan = Plan(layout, ROUNDS * ROWS * layout.data_degree, ROWS, ROUNDS, compute="fp32")
    form = "chunked" if name in ("llama", "gpt") else "full"
    case = PlanningCase(known, Cluster(DEVICE, 1, world.size, LINK, LINK), plan, loss=form)
    told = predict_run(case, HABITS)
    most = told.training_peak_bytes
    above, below = (end / told.peak_bytes for end in (told.high_bytes, told.low_bytes))
    shares = {"far": 0.75, "low": below - 0.005, "peak": 1.0, "high": above}
    limit = int(shares[where] * most) + 1
    if world.is_first:
        word = judge_memory(told, limit)
        out.write_text(json.dumps({"verdict": word.word, "text": word.text, "limit": limit}))
    world.barrier()
    simulated_cuda.set_limit(world.device.index or 0, limit)
    try:
        asked = {kind: 2} if kind in ("tp", "pp") else kind
        take_steps(started(world, name, asked, plan.batch), data)
    except (torch.OutOfMemoryError, ShoalError) as failure:
        if isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure):
            out.with_suffix(f".{world.rank}").touch()
        raise


def limits(models: list[str], out: str) -> int:
    """Layouts × models × limits: does what fits live, and what does not die?

    Rows that the file has of this source are not run again: a start that was ended goes on.
    """
    source, path = source_hash(), Path(out)
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows = kept["rows"] if kept.get("source") == source else []
    there = {(one["model"], one["layout"], one["limited"]) for one in rows}
    for name in models:
        for kind in LAYOUTS:
            for where in LIMITS:
                if (name, kind, where) in there:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "row.json"
                    words = [str(HERE / "devices.py"), "--limited", name, kind, where]
                    lives = True
                    try:
                        run_together([*words, str(file)], PROCESSES, deadline_s=300)
                    except (RuntimeError, TimeoutError) as failure:
                        lives = False
                        if not [*Path(folder).glob("row.[0-9]")]:
                            raise SystemExit(f"{name} {kind} {where}: {failure}") from None
                    told = json.loads(file.read_text())
                rows.append(
                    {"model": name, "layout": kind, "limited": where, "lives": lives, **told}
                )
                print(name, kind, where, told["verdict"], "lives" if lives else "dies", flush=True)
                document = {"machine": machine(), "source": source, "rows": rows}
                path.write_text(json.dumps(document, indent=1))
    wrong = [r for r in rows if r["verdict"] == "fits" and not r["lives"]]
    timid = [r for r in rows if r["verdict"] == "no" and r["lives"]]
    print(f"{len(rows)} runs: {len(wrong)} die that fit; {len(timid)} live that do not")
    refused = [r for r in rows if r["verdict"] == "no"]
    return 1 if wrong or len(timid) > 0.1 * len(refused) else 0


def chosen_rows(words: str, processes: int) -> list[tuple[dict[str, str], Any]]:
    """Rows for a world of so many processes: how they are labelled, and what they are."""
    found, names = [], {*words.split(",")}
    for name, layout, policies in ROWS_OF[processes]:
        label = {"model": name, "layout": str(layout), **policies}
        if not words or names & {name, " ".join(label.values())}:
            found.append((label, (name, layout, policies)))
    return found


def worker(out: Path, chosen: str) -> None:
    """All rows, one after another, in one world."""
    torch.set_num_threads(1)
    world = start_world()
    found = []
    for label, (name, layout, policies) in chosen_rows(chosen, world.size):
        try:
            told = row(world, name, layout, policies)
        except ShoalError as failure:
            told = {"why": f"{type(failure).__name__}: {failure}"}
        ranks = world.gather_json(told)
        if world.is_first:
            found.append({**label, "ranks": ranks})
            out.write_text(json.dumps(found))
            print(line(found[-1]), flush=True)


def line(one: dict[str, Any]) -> str:
    """A row as it is read."""
    label = " ".join(str(value) for key, value in one.items() if key not in ("ranks", "off"))
    if any("why" in rank for rank in one["ranks"]):
        return f"{label}: {next(r['why'] for r in one['ranks'] if 'why' in r)}"
    held, foreseen = fullest(one)
    first = max(rank["start"] for rank in one["ranks"])
    told = max(rank["foreseen_start"] for rank in one["ranks"])
    return (
        f"{label}: {held / 2**20:.1f} MiB, foreseen {foreseen / 2**20:.1f} "
        f"({foreseen / held - 1:+.1%}); start {first / 2**20:.1f}, {told / 2**20:.1f}"
    )


def fullest(one: dict[str, Any]) -> tuple[float, float]:
    """Bytes of the fullest rank over all instants, and as foreseen."""
    held = max(rank["held"] for rank in one["ranks"])
    foreseen = max(max(rank["foreseen_step"], rank["foreseen_start"]) for rank in one["ranks"])
    return held, foreseen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", default="", help="models, or rows as they are printed: a,b,…")
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", default="")
    parser.add_argument("--limits", action="store_true", help="run under limits instead")
    parser.add_argument("--limited", nargs=4, metavar=("MODEL", "LAYOUT", "LIMIT", "FILE"))
    options = parser.parse_args()
    kept = "devices-limits.json" if options.limits else "devices.json"
    options.out = options.out or str(HERE / "results" / kept)
    if options.limited:
        name, kind, where, file = options.limited
        limited(name, kind, where, Path(file))
        return 0
    if options.limits:
        return limits(options.rows.split(",") if options.rows else list(MODELS), options.out)
    if options.worker:
        worker(Path(options.worker), options.rows)
        return 0
    os.environ.setdefault("SIM_DEVICES", str(2 * PROCESSES))
    rows = []
    for count in (PROCESSES, 2 * PROCESSES):
        if not chosen_rows(options.rows, count):
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            words = [str(HERE / "devices.py"), "--worker", str(file), "--rows", options.rows]
            try:
                run_together(words, count, deadline_s=DEADLINE_S)
            except (RuntimeError, TimeoutError) as failure:
                print(failure)
            rows += json.loads(file.read_text()) if file.exists() else []
    whole = [one for one in rows if not any("why" in rank for rank in one["ranks"])]
    for one in whole:
        held, foreseen = fullest(one)
        one["off"] = foreseen / held - 1
    document = {"machine": machine(), "device": "simulated (tests/simgpu)", "gate": GATE}
    document |= {"mode": os.environ.get("SIM_MODE", ""), "rows": rows}
    Path(options.out).write_text(json.dumps(document, indent=1))
    outside = [one for one in whole if abs(one["off"]) > GATE]
    print(f"{len(whole)} of {len(rows)} rows, {len(outside)} outside of {GATE:.0%}")
    for one in outside:
        print("  ", line(one))
    return (
        1
        if outside or not rows or len(whole) < (0 if options.rows else len(MATRIX + LARGER))
        else 0
    )


if __name__ == "__main__":
    raise SystemExit(main())
