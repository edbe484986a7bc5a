"""One rank of `ddp_speed.py`: builds every program, checks that they agree, times them in pairs."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_speed import WARM_UP
from peers import Case, Program, make

from shoal.fabric import World, start_world
from shoal.models.llama import Llama

BATCHES = 8
AGREE = {"fp32": 1e-3, "bf16": 1e-2}
LAST = 10
LEAST = 20
"""Pairs before a budget of seconds ends the measurement."""


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = start_world()
    case = Case(**job["case"])
    torch.manual_seed(0)
    source = Llama(**case.arguments)
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    names = list(dict.fromkeys(name for pair in job["comparisons"] for name in pair))
    programs = {name: make(name, case, world, weights) for name in names}
    data = batches(case, world.rank)
    # Agreement is judged on what the warm-up gave: the first update, and the steps after it.
    for name in names:
        for _ in range(WARM_UP):
            advance(programs[name], data)
    losses = {name: global_losses(program, world) for name, program in programs.items()}
    difference = largest_difference(losses, AGREE[case.precision])
    comparisons = time_pairs(programs, job, data, world)
    ends = WARM_UP + len(comparisons[0]["ours_s"])
    losses = {name: global_losses(program, world) for name, program in programs.items()}
    measured = {
        "case": job["case"],
        "parameters": sum(p.numel() for p in source.parameters()),
        "loss_difference": difference,
        # at the same step for everyone, though some programs took part in more pairs
        "final_losses": {n: statistics.fmean(x[:ends][-LAST:]) for n, x in losses.items()},
        "losses": losses,
        "comparisons": comparisons,
    }
    if world.is_first:
        Path(job["out"]).write_text(json.dumps(measured))
    world.close()
    os._exit(0)  # the peers' own exit handlers would use the group that is gone


def batches(case: Case, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A few steps' samples of this rank, used in turn: token i is likely followed by 3·i + 1."""
    generator = torch.Generator().manual_seed(100 + rank)
    vocabulary, seq = case.arguments["vocabulary"], case.arguments["sequence"]
    rows = case.micro_batch * case.accumulate
    made = []
    for _ in range(BATCHES):
        noise = torch.randint(0, vocabulary, (rows, seq + 1), generator=generator)
        keep = torch.rand(rows, seq + 1, generator=generator) < 0.7
        for place in range(1, seq + 1):
            follow = (3 * noise[:, place - 1] + 1) % vocabulary
            noise[:, place] = torch.where(keep[:, place], follow, noise[:, place])
        made.append((noise[:, :-1].contiguous(), noise[:, 1:].contiguous()))
    return made


def advance(program: Program, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    program.step(*data[len(program.losses) % len(data)])


def global_losses(program: Program, world: World) -> list[float]:
    """Mean over ranks of every step's loss; Shoal's are global already."""
    mine = torch.tensor([float(x) for x in program.losses], dtype=torch.float64)
    world.all_reduce(mine)
    return (mine / world.size).tolist()


def largest_difference(losses: dict[str, list[float]], limit: float) -> float:
    """Largest relative difference to the first program; programs that differ are not compared."""
    first, *others = losses
    worst = 0.0
    for name in others:
        if name.endswith("_default"):
            continue  # no clipping: another trajectory, reported beside
        for a, b in zip(losses[first], losses[name], strict=True):
            worst = max(worst, abs(a - b) / abs(a))
        if worst > limit:
            raise SystemExit(f"{name}: losses {losses[name]} differ from {first}: {losses[first]}")
    return worst


def time_pairs(
    programs: dict[str, Program],
    job: dict[str, Any],
    data: list[tuple[torch.Tensor, torch.Tensor]],
    world: World,
) -> list[dict[str, Any]]:
    """Wall-clock seconds of the slowest rank and CPU seconds of all ranks, per step."""
    pairs, comparisons = job["pairs"], job["comparisons"]
    until_s = time.monotonic() + job.get("budget_s", float("inf"))
    mine = torch.zeros(pairs, len(comparisons), 2, 2, dtype=torch.float64)
    gc.collect()
    gc.freeze()
    for pair in range(pairs):
        # Rank 0 decides for all; a slow machine has fewer pairs, and a wider interval.
        if pair >= LEAST and world.broadcast_json(time.monotonic() > until_s):
            mine = mine[:pair]
            break
        for number, sides in enumerate(comparisons):
            for side in (0, 1) if (pair + number) % 2 == 0 else (1, 0):
                program = programs[sides[side]]
                dist.barrier()
                began_s, cpu_s = time.perf_counter(), time.process_time()
                advance(program, data)
                mine[pair, number, side, 0] = time.perf_counter() - began_s
                mine[pair, number, side, 1] = time.process_time() - cpu_s
        if world.is_first and sys.stderr.isatty():
            print(f"\r{pair + 1} of {pairs} pairs", end="", file=sys.stderr)
    everyone = world.all_gather(mine)  # [ranks, pairs, comparisons, side, wall or CPU]
    wall, cpu = everyone[..., 0].amax(0), everyone[..., 1].sum(0)
    return [
        {
            "ours": ours,
            "theirs": theirs,
            "ours_s": wall[:, number, 0].tolist(),
            "theirs_s": wall[:, number, 1].tolist(),
            "ours_cpu_s": cpu[:, number, 0].tolist(),
            "theirs_cpu_s": cpu[:, number, 1].tolist(),
        }
        for number, (ours, theirs) in enumerate(comparisons)
    ]


if __name__ == "__main__":
    main()
