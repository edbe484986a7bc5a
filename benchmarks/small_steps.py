"""The fixed cost of a step: small models, Shoal beside the loop that a user would write.

    python benchmarks/small_steps.py [--models mlp,chain] [--processes 1,2] [--rounds 40]
                                     [--json FILE]

`mlp` is three layers and a batch of 16, `chain` 300 blocks of 272 weights. Every process trains the
model with Shoal (ddp on several), by hand (DistributedDataParallel, AdamW, clipping and
`loss.item()`) and by hand once more (A/A). Blocks of steps take turns in one process of one thread.
A figure is the ratio of medians of paired blocks with its 95 % interval, from the slower rank.
`calls` counts the function calls of a step as cProfile sees them. `tree:PATH@mlp` takes Shoal's
source from PATH. Two cores: about two minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import SOURCE, machine, run_together
from ratios import ratio
from torch import nn

WARM, SAMPLES, DEADLINE_S = 40, 16, 600.0
STEPS = {"mlp": 20, "chain": 5}
"""Steps of a block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", default="mlp,chain")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="keep every figure in this file")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _one_rank(options.rank_of[0], int(options.rank_of[1]), Path(options.rank_of[2]))
        return
    rows = []
    for model in options.models.split(","):
        for processes in map(int, options.processes.split(",")):
            row = _measure(model, processes, options.rounds)
            rows.append(row)
            told = ", ".join(
                f"{name} {one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
                for name, one in row["ratios"].items()
            )
            print(
                f"{model:10} {processes} process(es)  {row['ms']['shoal']:6.2f} ms, by hand "
                f"{row['ms']['by hand']:6.2f} ms; {told}; {row['calls']:.0f} calls",
                flush=True,
            )
    if options.json:
        kept = {"machine": machine(), "rows": rows}
        Path(options.json).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _measure(model: str, processes: int, rounds: int) -> dict[str, Any]:
    tree, _, name = model.rpartition("@")
    if tree:
        os.environ["SHOAL_TREE"] = tree.removeprefix("tree:")
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = [str(Path(__file__).resolve()), "--rank-of", name, str(rounds), folder]
            run_together(words, processes, deadline_s=DEADLINE_S)
            ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    finally:
        os.environ.pop("SHOAL_TREE", None)
    slowest = max(ranks, key=lambda rank: statistics.median(rank["seconds"]["shoal"]))
    seconds = slowest["seconds"]
    return {
        "model": model,
        "processes": processes,
        "calls": slowest["calls"],
        "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "ratios": {
            "shoal ÷ by hand": vars(ratio(seconds["shoal"], seconds["by hand"])),
            "A/A": vars(ratio(seconds["by hand again"], seconds["by hand"])),
        },
        "seconds": seconds,
    }


def _net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
        )
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(300)]
    return nn.Sequential(nn.Linear(32, 16), *blocks, nn.Linear(16, 8))


def _one_rank(name: str, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if tree := os.environ.get("SHOAL_TREE"):
        sys.path[:] = [tree, *(path for path in sys.path if Path(path) != SOURCE)]
    import shoal

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    x, y = torch.randn(SAMPLES, 32), torch.randn(SAMPLES, 8)
    model = _net(name)
    run = shoal.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), shoal.mean_of_samples(nn.MSELoss()),
        "ddp" if size > 1 else "single", micro_batch=SAMPLES,
    )  # fmt: skip
    programs = {
        "shoal": lambda: run.step((x, y)),
        "by hand": _by_hand(name, x, y, size),
        "by hand again": _by_hand(name, x, y, size),
    }
    for step in programs.values():
        for _ in range(WARM):
            step()
    seconds: dict[str, list[float]] = {one: [] for one in programs}
    for place in range(rounds):
        order = list(programs) if place % 2 else list(programs)[::-1]
        for one in order:
            began_s = time.perf_counter()
            for _ in range(STEPS[name]):
                programs[one]()
            seconds[one].append((time.perf_counter() - began_s) / STEPS[name])
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        run.step((x, y))
    profile.disable()
    calls = pstats.Stats(profile).total_calls / 20
    kept = {"seconds": seconds, "calls": calls}
    (folder / f"{rank}.json").write_text(json.dumps(kept), encoding="utf-8")
    run.close()


def _by_hand(name: str, x: torch.Tensor, y: torch.Tensor, size: int) -> Callable[[], float]:
    model = _net(name)
    if size > 1 and not dist.is_initialized():
        raise RuntimeError("Shoal starts the process group that DistributedDataParallel uses")
    trained = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
