"""bf16 and fp16 reach what fp32 reaches: the demo task, three seeds, validation loss within 1 %.

`make proof` runs it, about a minute per row on 2 cores. What is done already stays in
proof/results/formats.json, so it can be stopped and started again; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "proof" / "results" / "formats.json"
FORMATS, SEEDS, LIMIT = ("fp32", "bf16", "fp16"), (0, 1, 2), 0.01
DEADLINE_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    rows: dict[str, Any] = {}
    if TARGET.exists() and not parser.parse_args().fresh:
        rows = json.loads(TARGET.read_text())["rows"]
    for seed in SEEDS:
        for precision in FORMATS:
            key = f"{precision} seed {seed}"
            if key not in rows:
                rows[key] = train(precision, seed)
                print(key, rows[key], flush=True)
                write(rows)
    worst = max(
        abs(rows[f"{p} seed {s}"]["loss"] / rows[f"fp32 seed {s}"]["loss"] - 1)
        for s in SEEDS
        for p in FORMATS
    )
    print(f"largest distance from fp32: {worst:.2%} (limit {LIMIT:.0%})")
    return 0 if worst <= LIMIT else 1


def train(precision: str, seed: int) -> dict[str, Any]:
    """The demo run in one format: validation loss, steps lost to the loss scale, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        subprocess.run(
            [
                *(sys.executable, "-m", "shoal", "train", "run.name=run", "train.prove=off"),
                *(f"precision.compute={precision}", f"train.seed={seed}"),
            ],
            cwd=folder,
            check=True,
            timeout=DEADLINE_S,
            stdout=subprocess.DEVNULL,
        )
        lines = (Path(folder) / "runs" / "run" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
    (finished,) = [e for e in events if e["event"] == "run_finished"]
    return {
        "loss": finished["validation_loss"],
        "scale_lowered": sum(e["event"] == "loss_scale_lowered" for e in events),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def write(rows: dict[str, Any]) -> None:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "task": "shoal train, its defaults, 2 processes; validation loss at the end",
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "rows": rows,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
