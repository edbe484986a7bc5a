"""A thousand bits flipped in weights and moments: which are seen, and what reaches a checkpoint.

`make proof` runs it, some minutes on 2 cores. Real processes train under five layouts; one bit at a
time is turned over in the memory of a rank drawn by lot, past everything that torch counts, half of
them before a step and half before a save, and turned back once the run has spoken. Right is: rank,
tensor and bit are named by every rank, no update was made, no checkpoint appeared. Clean steps and
saves between must not be blamed. The same is done under the default setting, which looks at some
steps only, up to the next save: what is not named must be gone, the checkpoint's bits those of a
twin; what nobody else holds is reported apart. What a look costs is measured beside it, in CPU seconds. The result
goes to proof/results/flips.json; --seed repeats one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(ROOT / "benchmarks")]
TARGET = ROOT / "proof" / "results" / "flips.json"
FLIPS, CLEAN = 200, 300
LAYOUTS: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "zero1": (2, "zero1"),
    "fsdp": (2, "fsdp"),
    "tp": (2, {"tp": 2}),
    "hsdp": (4, "hsdp"),
}
BY_DEFAULT: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "ddp of 4": (4, "ddp"),
    "hsdp": (4, "hsdp"),
    "ddp of pipelines": (4, {"dp_replicate": 2, "pp": 2}),
}
"""Weights and moments are held by two ranks at least."""
APART: dict[str, tuple[int, Any]] = {
    "zero1": (2, "zero1"),
    "fsdp": (2, "fsdp"),
    "tp": (2, {"tp": 2}),
}
"""Some are held once: nobody can compare them with another's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--flips", type=int, default=FLIPS, help="per layout")
    asked = parser.parse_args()
    import torch
    from processes import machine
    from source import source_hash

    import drift_case
    from worlds import Members, close_all

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[int, Members] = {}
        for layout, (size, words) in LAYOUTS.items():
            if size not in worlds:
                worlds[size] = Members(size, Path(folder))
            found[layout] = one_layout(worlds[size], words, folder, asked.flips, asked.seed)
            print(json.dumps({layout: found[layout]}), flush=True)
        by_default: dict[str, Any] = {}
        for layout, (size, words) in (BY_DEFAULT | APART).items():
            count = asked.flips * 5 // 4 if layout in BY_DEFAULT else asked.flips
            told = worlds[size].call(
                "drift_case:flips_by_default",
                layout=words,
                folder=f"{folder}/default {layout}",
                count=count,
                seed=asked.seed,
                deadline_s=1200,
            )
            by_default[layout] = told[0]
            print(json.dumps({layout: told[0]}), flush=True)
        close_all(list(worlds.values()))
    torch.set_num_threads(1)
    costs = drift_case.costs()
    well = all(not one["wrong"] and not one["false alarms"] for one in found.values())
    well &= all(not by_default[layout]["saved"] for layout in BY_DEFAULT)
    record = {
        "flips": sum(one["flips"] for one in found.values()),
        "named rightly": sum(one["flips"] - len(one["wrong"]) for one in found.values()),
        "in checkpoints": sum(len(one["wrong"]) for one in found.values()),
        "clean steps and saves": sum(sum(one["clean"].values()) for one in found.values()),
        "false alarms": sum(len(one["false alarms"]) for one in found.values()),
        "layouts": found,
        "by default": {layout: by_default[layout] for layout in BY_DEFAULT},
        "by default, of what one rank alone holds": {
            layout: by_default[layout] for layout in APART
        },
        "cost of a look, CPU seconds of a step's": costs,
        "seed": asked.seed,
        "load_average": round(os.getloadavg()[1], 1),
        "source": source_hash(),
        "machine": machine(),
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {TARGET.relative_to(ROOT)}")
    return 0 if well else 1


def one_layout(world: Any, words: Any, folder: str, flips: int, seed: int) -> dict[str, Any]:
    """What all ranks of a world said alike, and clean steps under the default setting."""
    asked = {"layout": words, "folder": f"{folder}/{time.time_ns()}", "seed": seed}
    answers = world.call("drift_case:flips", deadline_s=550, count=flips, **asked)
    clean = world.call("drift_case:clean_steps", layout=words, count=CLEAN, deadline_s=550)
    first = answers[0]
    alarms = [one for told in answers for one in told["false alarms"]]
    alarms += [told["told"] for told in clean if told["told"] != "nothing was raised"]
    return {
        "flips": first["flips"],
        "hit": dict(sorted(Counter(first["hit"]).items())),
        "wrong": [one for told in answers for one in told["wrong"]],
        "clean": {**first["clean"], "steps by default": CLEAN},
        "false alarms": alarms,
    }


if __name__ == "__main__":
    sys.exit(main())
