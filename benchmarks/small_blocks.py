"""A chain of many small blocks on two processes: ddp and fsdp, Shoal's and by hand.

    python benchmarks/small_blocks.py [--blocks 300] [--width 16] [--rounds 20] [--json FILE]

`fsdp2 one unit` is torch's `fully_shard` of the whole model alone, the fewest collectives and hooks
that it can have. `fsdp2 list` shards all blocks as one unit and the rest as another. Rounds of 3
steps take turns in one process of one thread. A figure is the median over rounds of the slower
rank: processor milliseconds a step, which a busy machine disturbs less, and wall milliseconds.
Ratios are of processor time, to DDP by hand and to Shoal's ddp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import machine, run_together
from torch import nn

SAMPLES, STEPS, WARM, DEADLINE_S = 16, 3, 1, 1800.0
PROGRAMS = ("ddp", "fsdp2 one unit", "fsdp2 list", "shoal ddp", "shoal fsdp")


def main() -> None:
    """Measure, print a line a program, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="keep every figure in this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return one_rank(options.blocks, options.width, options.rounds, Path(options.rank_of))
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(str(Path(__file__).resolve()), "--rank-of", folder, "--blocks", str(options.blocks)),
            *("--width", str(options.width), "--rounds", str(options.rounds)),
        ]
        run_together(words, 2, deadline_s=DEADLINE_S)
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    rows = []
    for name in PROGRAMS:
        row: dict[str, Any] = {"program": name}
        for clock in ("cpu_s", "wall_s"):
            row[clock] = max(statistics.median(rank[name][clock]) for rank in ranks)
        rows.append(row)
    by_name = {row["program"]: row for row in rows}
    for row in rows:
        for other in ("ddp", "shoal ddp"):
            row[f"÷ {other}"] = row["cpu_s"] / by_name[other]["cpu_s"]
        print(
            f"{row['program']:15} cpu {row['cpu_s'] * 1e3:7.1f} ms  wall "
            f"{row['wall_s'] * 1e3:7.1f} ms  cpu ÷ ddp by hand {row['÷ ddp']:.2f}  ÷ shoal's ddp "
            f"{row['÷ shoal ddp']:.2f}",
            flush=True,
        )
    if options.json:
        kept = {"machine": machine(), "options": vars(options) | {"json": ""}, "rows": rows}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return None


def net(blocks: int, width: int) -> nn.Module:
    """Build the chain: blocks of width² + width weights between two layers."""
    torch.manual_seed(0)
    chain = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(32, width), *chain, nn.Linear(width, 8))


def one_rank(blocks: int, width: int, rounds: int, folder: Path) -> None:
    """Take rounds of every program in turn; write this rank's seconds."""
    import shoal
    from shoal.fabric import start_world

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    x, y = torch.randn(SAMPLES, 32), torch.randn(SAMPLES, 8)
    steps: dict[str, Callable[[], Any]] = {}
    for layout in ("ddp", "fsdp"):
        model = net(blocks, width)
        run = shoal.parallelize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3),
            shoal.mean_of_samples(nn.MSELoss()), layout, micro_batch=SAMPLES, world=start_world(),
        )  # fmt: skip
        steps[f"shoal {layout}"] = lambda run=run: run.step((x, y))
    for name in PROGRAMS[:3]:
        steps[name] = by_hand(name, net(blocks, width), x, y)
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"cpu_s": [], "wall_s": []} for name in PROGRAMS
    }
    for place in range(WARM + rounds):
        for name in PROGRAMS if place % 2 else reversed(PROGRAMS):
            began = time.process_time(), time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            if place >= WARM:
                seconds[name]["cpu_s"].append((time.process_time() - began[0]) / STEPS)
                seconds[name]["wall_s"].append((time.perf_counter() - began[1]) / STEPS)
    (folder / f"{rank}.json").write_text(json.dumps(seconds), encoding="utf-8")
    start_world().barrier()


def by_hand(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """Return a step of the loop that a user would write."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    trained: nn.Module = model
    if name == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        parts = list(model)[1:-1]
        if name == "fsdp2 list":
            fully_shard(parts, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
