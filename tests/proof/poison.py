"""A bf16 run of ddp, over and over, while fresh and freed memory is filled with rubbish.

Whoever reads memory before writing it reads what was there by chance. Here glibc fills what it hands
out and takes back (MALLOC_PERTURB_, without its small caches), with other bytes in each pair of
processes; each pair trains the same tiny Llama again and again from the same seed. All runs of all
pairs must give the same bits, and the same within bf16 as one process does.

    python tests/proof/poison.py [--runs 60] [--out FILE]

Source of the question: docs/lab-log.md, "a clean bf16 run that differed from its twin".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "worlds")]

from processes import machine, run_together  # noqa: E402

FILLS = (0, 0x01, 0x80, 0x3C)
"""0: as usual; else freed memory has this byte, and fresh memory all its other bits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=60, help="of each pair of processes")
    parser.add_argument("--out", help="write the JSON there too")
    parser.add_argument("--rank-into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_into:
        rank(options.runs, Path(options.rank_into))
        return
    told = {}
    for fill in FILLS:
        os.environ["MALLOC_PERTURB_"] = str(fill)
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "told.json"
            command = [__file__, "--runs", str(options.runs), "--rank-into", str(out)]
            run_together(command, 2, deadline_s=600)
            told[f"{fill:#04x}"] = json.loads(out.read_text())
    bits = {one for pair in told.values() for one in pair["bits"]}
    record = {
        "runs": sum(pair["runs"] for pair in told.values()),
        "different bits": len(bits),
        "furthest from one process": max(pair["apart"] for pair in told.values()),
        "pairs": told,
        "machine": machine(),
    }
    print(json.dumps({key: record[key] for key in list(record)[:3]}))
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(len(bits) != 1)


def rank(runs: int, out: Path) -> None:
    """One of two processes: the same run, `runs` times; rank 0 tells what came out."""
    import torch

    from shoal.fabric import start_world

    torch.set_num_threads(1)
    world = start_world()
    alone = trained(None)
    seen = []
    furthest = 0.0
    for number in range(runs):
        if world.is_first:
            print(f"run {number} of {runs}, fill {os.environ['MALLOC_PERTURB_']}", flush=True)
        weights = trained(world)
        seen.append(digest(weights))
        furthest = max(furthest, apart(weights, alone))
    everyone = world.gather_json(seen)
    if world.is_first:
        bits = sorted({one for told in everyone for one in told})
        out.write_text(json.dumps({"runs": runs, "bits": bits, "apart": furthest}))
    world.close()


def trained(world: Any) -> dict[str, Any]:
    """Master weights after two steps of SGD; `world` None: in this process alone."""
    import torch

    import cases
    import island_case
    import shoal
    from shoal.parallel.whole import gather_weights

    data = cases.dataset("llama")
    run = shoal.parallelize(
        cases.build("llama"),
        lambda p: torch.optim.SGD(p, lr=0.05),
        cases.loss("llama"),
        "single" if world is None else "ddp",
        batch=8,
        micro_batch=2,
        precision="bf16",
        seed=3,
        world=island_case.single() if world is None else world,
        sample=lambda: torch.utils.data.default_collate([data[k] for k in range(2)]),
    )
    for done, batch in enumerate(run.loader(data), 1):
        run.step(batch)
        if done == 2:
            break
    weights = {name: weight.clone() for name, weight in gather_weights(run.program).items()}
    island_case.leave(run)
    return weights


def digest(weights: dict[str, Any]) -> str:
    """Of every bit."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def apart(weights: dict[str, Any], alone: dict[str, Any]) -> float:
    """The largest distance of a tensor from one process's, over the latter's norm."""
    found = [
        float((weights[name].double() - other.double()).norm() / other.double().norm())
        for name, other in alone.items()
        if float(other.double().norm())
    ]
    return max(found)


if __name__ == "__main__":
    main()
