"""Clean code under many drawn schedules: nothing is reported, and numbers stay the CPU's.

    python tests/simgpu/seeds.py [--seeds 200] [--out FILE] [NAME …]

Every row of `own_loop.py` takes one step per seed, 0 to N − 1: its passes, collectives, copies and its
optimizer's step run in an order drawn from that seed. Weights after all of them have the bits of the same steps on the same devices where every kernel
runs as it is launched, and losses and weights are those of the CPU. FILE gets a row when it is done; rows
that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ranks import on_cpu, world
from simulated.build import library

HERE = Path(__file__).resolve().parent
FOUR = ("hsdp", "tp fsdp")
TWO = ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", "recompute", "offload activations")
CODED = ("compress", "powersgd", "topk", "int8 zero", "one-bit fsdp", "saved", "bf16 weights")
ROUNDED = ("bf16 weights", "powersgd")
"""Not the CPU's numbers: its autocast has another list; a basis of nearly equal directions turns a last
digit of step 12 into 3e-6 by step 200. Bits and reports count."""
CLOSE = 1e-9  # after all steps; a step that is in another order somewhere is off by far more


def row(environ: dict[str, str], name: str, seeds: int) -> dict[str, Any]:
    """One layout under all seeds: what was red, empty if nothing, and how far numbers are apart."""
    size = 4 if name in FOUR else 2
    words = (name, "--seeds", str(seeds))
    expected = world("own_loop.py", size, words, on_cpu())["rows"][name]
    try:
        at_once = world("own_loop.py", size, words, {**environ, "SIM_MODE": "eager"})
        told = world("own_loop.py", size, words, environ)
    except AssertionError as failure:
        return {"processes": size, "seeds": seeds, "said": str(failure)[-2000:]}
    ours = told["rows"][name]
    if isinstance(ours, str):
        return {"processes": size, "seeds": seeds, "said": ours}
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))
    wrong = name not in ROUNDED and not apart <= CLOSE
    said = f"numbers differ by {apart:.1e}" if wrong else ""
    if told["steps"][name]["bits"] != at_once["steps"][name]["bits"]:
        said = "other bits than without a schedule"
    return {
        "processes": size,
        "seeds": seeds,
        "launches": told["launches"],
        "apart": apart,
        "said": said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=(*TWO, *FOUR, *CODED))
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    paths = os.pathsep.join((str(HERE / "site"), str(HERE.parents[1] / "src")))
    environ = {**os.environ, "SIM_LIBRARY": str(library()), "SIM_DEVICES": "4", "PYTHONPATH": paths}
    rows = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    for name in asked.names:
        if rows.get(name, {}).get("seeds", 0) >= asked.seeds:
            continue
        rows[name] = row(environ, name, asked.seeds)
        print(name, rows[name], flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(told["said"] for told in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
