"""Step time of this checkout against another one's: both hold their runs at once, and step in turn.

A side is a checkout: two processes with one thread each, in which `shoal.parallelize` has made a
small Llama ready. All sides are there at once; one of them steps, the others wait for a word on a
pipe. A triple is one step of each, one right after the other, in rotating order; the slower rank
counts. Beside the other checkout stands A/A: this one a second time. Two instances of the same
program differ by up to 5 % for as long as they live (where their memory lies), so all sides are
launched again and again, and a pair is the medians of two sides of one launch. Memory is asked in
huge pages, of which there are fewer ways to lie.

    python benchmarks/checkouts.py DIR                     ddp in fp32 and bf16, tp 2
    python benchmarks/checkouts.py DIR --launches 2        does it work?
    python benchmarks/checkouts.py DIR --processor-seconds
        processor seconds of both ranks instead of the slower rank's time: other work disturbs less

Gate: the upper end of every ratio's interval ≤ 1.02; of processor seconds the ratio itself ≤ 1.01.
Prints one JSON line with every raw time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ddp_speed import MICRO_BATCH, SIZES
from processes import machine
from ratios import ratio

HERE = Path(__file__).resolve().parent
LIMIT, RANKS, WARM_UP = 1.02, 2, 3
CPU_LIMIT = 1.01
CASES: dict[str, dict[str, Any]] = {
    "ddp fp32": {"layout": "ddp", "precision": "fp32"},
    "ddp bf16": {"layout": "ddp", "precision": "bf16"},
    "tp2 fp32": {"layout": {"tp": 2}, "precision": "fp32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--launches", type=int, default=12)
    parser.add_argument("--triples", type=int, default=15, help="of each launch")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--processor-seconds", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(json.loads(options.rank_of))
        return
    cpu = options.processor_seconds
    record: dict[str, Any] = {"machine": machine(), "of": "processor" if cpu else "wall"}
    for name in options.cases.split(","):
        launches = [
            time_case(CASES[name], options.other, options.triples, cpu=cpu)
            for _ in range(options.launches)
        ]
        middle = {k: [statistics.median(one[k]) for one in launches] for k in launches[0]}
        told = {k: ratio(middle["ours"], middle[k]) for k in ("theirs", "ours again")}
        record[name] = {"step_s": launches, "ratios": {k: vars(one) for k, one in told.items()}}
        for other, one in told.items():
            verdict = one.verdict(LIMIT) if other == "theirs" else "A/A"
            if cpu and other == "theirs":
                verdict = "passed" if one.value <= CPU_LIMIT else "failed"
            interval = f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
            print(f"{name}: ours / {other} {interval} {verdict}", flush=True)
    print(json.dumps(record))


def time_case(
    case: dict[str, Any], other: Path, triples: int, *, cpu: bool = False
) -> dict[str, list[float]]:
    """Seconds of every step of every side; processor seconds of both ranks if `cpu`."""
    sides = {"ours": HERE.parent, "theirs": other.resolve(), "ours again": HERE.parent}
    running = {name: Side(source, case) for name, source in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for turn in range(WARM_UP + triples):
            names = [*list(sides)[turn % 3 :], *list(sides)[: turn % 3]]
            for name in names:
                step_s = running[name].step(cpu=cpu)
                if turn >= WARM_UP:
                    times[name].append(step_s)
    finally:
        for side in running.values():
            side.end()
    return times


class Side:
    """The processes of one checkout."""

    def __init__(self, source: Path, case: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", json.dumps(case)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **world,
                    "PYTHONPATH": str(source / "src"),
                    "OMP_NUM_THREADS": "1",
                    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
            )
            for rank in range(RANKS)
        ]

    def step(self, *, cpu: bool = False) -> float:
        """Seconds of one step, of the slower rank; processor seconds of both ranks if `cpu`."""
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write("step\n")
            rank.stdin.flush()
        answers = []
        for rank in self.ranks:
            assert rank.stdout
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError("a rank ended")
            answers.append(float(line.split()[1 if cpu else 0]))
        return sum(answers) if cpu else max(answers)

    def end(self) -> None:
        """Let both processes end."""
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def work(case: dict[str, Any]) -> None:
    """One rank: a step for every line."""
    import torch

    import shoal
    from shoal.models.llama import Llama

    torch.set_num_threads(1)
    sizes, micro_batch = SIZES["small"], MICRO_BATCH["small"]
    data = 1 if isinstance(case["layout"], dict) else RANKS
    rank = int(os.environ["RANK"]) if data > 1 else 0
    torch.manual_seed(rank)
    shape = (micro_batch, sizes["sequence"] + 1)
    ids = torch.randint(0, sizes["vocabulary"], shape)
    batch = (ids[:, :-1], ids[:, 1:])
    run = shoal.parallelize(
        lambda: Llama(**sizes),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        batch=micro_batch * data,
        micro_batch=micro_batch,
        sample=batch,
        **case,
    )
    answers, sys.stdout = sys.stdout, sys.stderr
    for _ in sys.stdin:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        run.step(batch)
        took_s = time.perf_counter() - began_s
        print(took_s, time.process_time() - cpu_s, file=answers, flush=True)
    run.close()


if __name__ == "__main__":
    main()
