"""`shoal links` against loops written by hand: does it time what anybody would time?

Two processes with one thread each, gloo. A block is some calls of one collective after another,
once by `shoal links`' own loop and once by a loop of bare `torch.distributed` calls that allocates
its tensors beforehand; its time is the median over calls of the slowest rank. A small message now
and then waits a whole time slice for its core, ten times as long as it takes: its block is of so
many calls that the median does not see it. A pair is a block of each, one right after the other,
in alternating order; beside them a second block of ours (A/A).
The gate of a row: ratio between 0.9 and 1.1 with its whole interval, A/A's half-width at most 5 %;
else it is open. gloo's own reduce-scatter sends as much as an all-reduce, and no run uses it: by
hand is the all-to-all and the sum that runs make; its own is a row beside, which is no gate.

    python benchmarks/links.py --quick     does everything work?
    python benchmarks/links.py             100 pairs; writes benchmarks/results/links.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import machine, run_together
from ratios import ratio

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "links.json"
PROCESSES, PAIRS = 2, 100
CALLS = {2**16: 51, 2**22: 15}
"""Calls in a block, by the message's bytes."""
LOW, HIGH, NOISE = 0.9, 1.1, 0.05
OWN = "reduce_scatter of gloo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a few pairs")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", default=str(OUT), help="where the JSON goes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        job = {"out": str(out), "pairs": 4 if options.quick else options.pairs}
        command = [str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        run_together(command, PROCESSES, deadline_s=3600)
        rows = json.loads(out.read_text())
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/links.py", *sys.argv[1:]]),
        "machine": machine(),
        "processes": PROCESSES,
        "calls": CALLS,
        "rows": [{**row, **judged(row)} for row in rows],
    }
    for row in record["rows"]:
        low, high = row["interval"]
        print(
            f"{row['kind']:<24}{row['bytes']:>9} B  {row['ratio']:.3f} [{low:.3f}, {high:.3f}]  "
            f"A/A {row['twin']:.3f} ± {row['twin_half_width']:.3f}  {row['verdict']}"
        )
    if not options.quick:
        Path(options.out).write_text(json.dumps(record) + "\n")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Ratio, interval, A/A and verdict of a row's raw times."""
    ours, twin = ratio(row["ours"], row["by_hand"]), ratio(row["ours"], row["again"])
    inside = ours.low >= LOW and ours.high <= HIGH
    outside = ours.high < LOW or ours.low > HIGH
    verdict = "pass" if inside else "fail" if outside else "open"
    if twin.half_width > NOISE or abs(twin.value - 1) > NOISE:
        verdict = "open"
    return {
        "ratio": ours.value,
        "interval": [ours.low, ours.high],
        "twin": twin.value,
        "twin_half_width": twin.half_width,
        "verdict": "no gate" if row["kind"] == OWN else verdict,
    }


def work(job: dict[str, Any]) -> None:
    """As one of the processes: all pairs of all rows; rank 0 writes their raw times."""
    from shoal.fabric import start_world
    from shoal.fabric.exchanges.timed_collectives import EVERY, prepare_bare_collective
    from shoal.machine.link_rates import slowest_by_round, time_calls

    world = start_world()

    def ours(kind: str, size: int) -> float:
        name = "reduce_scatter" if kind == OWN else kind
        return statistics.median(
            slowest_by_round(
                time_calls(world, prepare_bare_collective(world, name, size), CALLS[size])
            )
        )

    rows = []
    for size in CALLS:
        for kind in (*EVERY, OWN):
            row: dict[str, Any] = {"kind": kind, "bytes": size}
            row |= {"ours": [], "by_hand": [], "again": []}
            for pair in range(job["pairs"]):
                order = ["ours", "by_hand", "again"]
                for who in order if pair % 2 else order[::-1]:
                    taken = by_hand(kind, size) if who == "by_hand" else ours(kind, size)
                    row[who].append(taken)
            rows.append(row)
    if world.is_first:
        Path(job["out"]).write_text(json.dumps(rows))
    world.close()


def by_hand(kind: str, size: int) -> float:
    """Median seconds of a collective by a loop of bare torch calls; of the slowest rank."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tensor = torch.zeros(size // 4)
    other, part = torch.zeros_like(tensor), torch.zeros(size // 4 // ranks)

    def exchange_and_add() -> None:
        dist.all_to_all_single(other, tensor)
        torch.sum(other.view(ranks, -1), 0, out=part)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part),
        "reduce_scatter": exchange_and_add,
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, tensor),
        OWN: lambda: dist.reduce_scatter_tensor(part, tensor),
    }
    call = calls[kind]
    call()
    dist.barrier()
    taken = []
    for _ in range(CALLS[size]):
        began_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began_s)
    every = [torch.zeros(CALLS[size], dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(every, torch.tensor(taken, dtype=torch.float64))
    return float(torch.stack(every).amax(0).median())


if __name__ == "__main__":
    main()
