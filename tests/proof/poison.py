"""A bf16 run of ddp, over and over, while fresh and freed memory is filled with rubbish.

Whoever reads memory before writing it reads what was there by chance. Here glibc fills what it hands
out and takes back (M_PERTURB, without its small caches), with other bytes in each pair of processes;
each pair is new, and trains the same tiny Llama a few times from the same seed. All runs of all
pairs must give the same bits, and the same within bf16 as one process does.

    python tests/proof/poison.py [--trials 240] [--out FILE]

Source of the question: docs/lab-log.md, "a bf16 run that differed from its twin".
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "worlds")]

FILLS = (0, 0x01, 0x80, 0x3C)
"""0: as usual; else freed memory has this byte, and fresh memory all its other bits."""
M_PERTURB = -6
RUNS = 5
"""Of each pair of processes."""
UNCACHED = "glibc.malloc.tcache_count=0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trials", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=1500.0, help="begin none after that")
    parser.add_argument("--out", help="write the JSON there too")
    options = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != UNCACHED:  # read once, when a process begins
        os.environ["GLIBC_TUNABLES"] = UNCACHED
        os.execv(sys.executable, [sys.executable, *sys.argv])

    import endings
    import torch
    from processes import machine
    from source import source_hash

    torch.set_num_threads(1)
    for early in (*endings.EARLY, "cases", "island_case"):
        importlib.import_module(early)
    alone = trained(None)
    gc.collect()
    gc.freeze()
    began_s = time.monotonic()
    begun = 0
    with tempfile.TemporaryFile("w+") as told:  # without a name: nobody's exit removes it
        while begun * RUNS < options.trials and time.monotonic() - began_s < options.seconds:
            work = functools.partial(pair, FILLS[begun % len(FILLS)], told, alone)
            if (ended := endings.world_of(endings.at_once(work))) != "well":
                sys.exit(f"pair {begun}: {ended}")
            begun += 1
            if begun % 8 == 0:
                print(f"{begun * RUNS} runs, {time.monotonic() - began_s:.0f} s", flush=True)
        told.seek(0)
        pairs = [json.loads(line) for line in told]
    bits = {one for each in pairs for one in each["bits"]}
    record = {
        "runs": len(pairs) * RUNS,
        "pairs of processes": len(pairs),
        "different bits": len(bits),
        "furthest from one process": max(each["apart"] for each in pairs),
        "pairs by fill": dict(Counter(f"{each['fill']:#04x}" for each in pairs)),
        "source": source_hash(),
        "machine": machine(),
    }
    print(json.dumps({key: record[key] for key in list(record)[:-2]}))
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(len(bits) != 1)


def pair(fill: int, told: IO[str], alone: dict[str, Any]) -> None:
    """One of two processes: the same run, RUNS times; rank 0 tells what came out."""
    import torch

    from shoal.fabric import start_world

    ctypes.CDLL(None).mallopt(M_PERTURB, fill)
    for size in (64, 1 << 22):  # small and mapped: is what is handed out filled?
        fresh = torch.empty(size, dtype=torch.uint8)
        if fill and not bool((fresh == 0xFF - fill).all()):
            sys.exit(f"glibc left {size} fresh bytes as they were")
    world = start_world()
    seen = []
    furthest = 0.0
    for _ in range(RUNS):
        weights = trained(world)
        seen.append(digest(weights))
        furthest = max(furthest, apart(weights, alone))
    everyone = world.gather_json(seen)
    if world.is_first:
        bits = sorted({one for rank in everyone for one in rank})
        told.write(json.dumps({"fill": fill, "bits": bits, "apart": furthest}) + "\n")
        told.flush()
    world.close()


def trained(world: Any) -> dict[str, Any]:
    """Master weights after two steps of SGD; `world` None: in this process alone."""
    import torch

    import cases
    import island_case
    import shoal
    from shoal.parallel.build.full_state import gather_weights

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
