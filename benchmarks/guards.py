"""What the guards of a run cost in a step: sums against flipped bits, and the page that is watched.

Two processes with one thread each hold one model four times: without guards, the same again (A/A),
with `train.drift = "auto"`, and with the page that a launcher reads, fingerprints of collectives
among what is written there. A pair is a block of steps of one and a block of the plain one, one
right after the other, in turns; the slowest rank's wall time counts. Blocks are longer than the
distance from one look to the next, which is told beside.

    python benchmarks/guards.py --quick     does it work?
    python benchmarks/guards.py             some minutes, on an idle machine

Gate: the interval's upper end at most 1.01 for each; open where A/A is no narrower than that.
Writes benchmarks/results/guards-DATE.json with every block's time and the machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import machine, run_together
from ratios import ratio

HERE = Path(__file__).resolve().parent
LIMIT, PROCESSES, WARM_UP_STEPS = 1.01, 2, 24
SIZES: dict[str, dict[str, Any]] = {
    "small": {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2},
    "middle": {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2},
}
BLOCK_STEPS = {"small": 48, "middle": 12}
PLAIN, AGAIN, DRIFT, WATCHED = "plain", "plain again", "drift", "watched"
VOCABULARY, SEQUENCE, ROWS = 2048, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="three pairs; nothing is written")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        work(json.loads(asked.rank_of))
        return
    cases: dict[str, Any] = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            job = {"size": size, "pairs": 3 if asked.quick else asked.pairs, "out": str(out)}
            run_together([__file__, "--rank-of", json.dumps(job)], PROCESSES, deadline_s=1500)
            cases[size] = judged(json.loads(out.read_text()))
        for name, row in cases[size]["ratios"].items():
            shown = f"{row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"
            print(f"{size:8}{name:14}{shown}  {row['verdict']}", flush=True)
        print(f"{size:8}a look every {cases[size]['every']} steps", flush=True)
    if asked.quick:
        return
    target = HERE / "results" / f"guards-{datetime.now(UTC):%Y%m%d}.json"
    target.write_text(json.dumps({"machine": machine(), "limit": LIMIT, **cases}, indent=1) + "\n")
    print(f"written: {target.relative_to(HERE.parent)}")


def judged(measured: dict[str, Any]) -> dict[str, Any]:
    """With the ratio of each to the plain one, and what the gate says of it."""
    ratios = {}
    for name, pairs in measured["block_s"].items():
        found = ratio([ours for ours, _ in pairs], [plain for _, plain in pairs])
        verdict = "A/A" if name == AGAIN else found.verdict(LIMIT)
        ratios[name] = {"value": found.value, "low": found.low, "high": found.high}
        ratios[name]["verdict"] = verdict
    return {"ratios": ratios, **measured}


def work(job: dict[str, Any]) -> None:
    """One rank: every program, its blocks in turns."""
    import torch

    from shoal import parallelize
    from shoal.base import phases
    from shoal.base.watch_page import PAGE_BYTES, Page
    from shoal.fabric import start_world
    from shoal.fabric.fingerprints import Fingerprints
    from shoal.models.catalog import build
    from shoal.models.loss import token_loss

    torch.set_num_threads(1)
    world = start_world()
    page = Page(mmap.mmap(-1, PAGE_BYTES))
    generator = torch.Generator().manual_seed(world.rank)
    batch = torch.randint(0, VOCABULARY, (2, ROWS, SEQUENCE), generator=generator)

    def program(drift: str) -> Any:
        return parallelize(
            lambda: build("llama", SIZES[job["size"]], vocabulary=VOCABULARY, sequence=SEQUENCE),
            lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
            token_loss,
            layout="ddp",
            world=world,
            batch=ROWS * world.size,
            micro_batch=ROWS,
            precision="fp32",
            sample=(batch[0, :1], batch[1, :1]),
            drift=drift,
        )

    runs = {name: program("auto" if name == DRIFT else "off") for name in (PLAIN, AGAIN, DRIFT)}
    runs[WATCHED] = program("off")
    kept: list[Fingerprints] = []

    def block(name: str, steps: int) -> float:
        run, watched = runs[name], name == WATCHED
        world.traffic.page = phases.page = page if watched else None
        if watched and not kept:
            kept.append(Fingerprints(page, run.step_count + 1))
        world.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            run.step((batch[0], batch[1]))
        return max(world.gather_json(time.perf_counter() - began_s))

    for name in runs:
        block(name, WARM_UP_STEPS)
    count = BLOCK_STEPS[job["size"]]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in (AGAIN, DRIFT, WATCHED)}
    for number in range(job["pairs"]):
        for name, pairs in took.items():
            order = (name, PLAIN) if number % 2 else (PLAIN, name)
            told = {one: block(one, count) for one in order}
            pairs.append((told[name], told[PLAIN]))
    if world.is_first:
        measured = {
            "parameters": runs[PLAIN].plan.parameters,
            "steps": count,
            "every": runs[DRIFT].touched.drift.every,
            "block_s": took,
        }
        Path(job["out"]).write_text(json.dumps(measured))
    runs[PLAIN].close()


if __name__ == "__main__":
    main()
