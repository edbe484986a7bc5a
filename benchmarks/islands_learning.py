"""How well islands learn: validation loss of DiLoCo's family beside data parallelism, equal tokens.

A Llama of about 0.6 M parameters on the standard library's text, trained by the real command. Every
row sees the same number of tokens, in the same number of inner steps of the same size in sum: data
parallelism takes steps of 32 samples, 2 islands of 16 each, 4 islands of 8 each. Three seeds; the
learning rate is the same for all rows.

    python benchmarks/islands_learning.py            about 25 minutes on 2 cores
    python benchmarks/islands_learning.py --seeds 1 --steps 60      does it work?

Gates: DiLoCo with 2 islands within 2 % of data parallelism, streaming in 4 bits within 0.5 % of
DiLoCo, in the mean over seeds. Writes benchmarks/results/islands-learning.json, resumable by row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import machine

TARGET = Path(__file__).resolve().parent / "results" / "islands-learning.json"
SEQUENCE, PERIOD, SAMPLES = 128, 30, 32
MODEL = (
    "model.dim=96", "model.layers=3", "model.heads=4", "model.kv_heads=4",
    f"data.sequence={SEQUENCE}", "optimizer.lr=2e-3", "train.prove=off", "precision.compute=fp32",
)  # fmt: skip
EQUAL = ("islands.pace=equal", f"islands.period={PERIOD}")
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data parallel": (1, ()),
    "diloco, 2 islands": (2, ("islands.method=diloco", *EQUAL)),
    "streaming e3m0, 2 islands": (2, ("islands.method=streaming-diloco", *EQUAL)),
    "diloco, 4 islands": (4, ("islands.method=diloco", *EQUAL)),
    "streaming e3m0, 4 islands": (4, ("islands.method=streaming-diloco", *EQUAL)),
    "diloco int8, 2 islands": (2, ("islands.method=diloco", "islands.codec=int8", *EQUAL)),
}
"""Islands, and what is said to the command."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="inner steps of every row")
    parser.add_argument("--rows", default="", help="comma-separated numbers of rows; default: all")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    chosen = [list(ROWS)[int(n)] for n in options.rows.split(",")] if options.rows else list(ROWS)
    record = {"rows": {}, "steps": options.steps}
    if options.out.exists():
        known = json.loads(options.out.read_text())
        record = known if known["steps"] == options.steps else record
    for seed in range(options.seeds):
        for row in chosen:
            key = f"{row} | {seed}"
            if key not in record["rows"]:
                record["rows"][key] = train(row, seed, options.steps)
                record.update(machine=machine(), arguments=[*MODEL, *EQUAL])
                record["tokens"] = options.steps * SAMPLES * SEQUENCE
                options.out.write_text(json.dumps(record, indent=1) + "\n")
                print(key, record["rows"][key], flush=True)
    return report(record, options.seeds)


def train(row: str, seed: int, steps: int) -> dict[str, Any]:
    """One run of the command: its validation loss, and what an island sent."""
    islands, asked = ROWS[row]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "shoal", "train", *MODEL, *asked, f"train.seed={seed}",
            f"train.steps={steps}", f"train.batch={SAMPLES // islands}", "launch.processes=1",
            "run.name=run", "train.micro_batch=4",
        ]  # fmt: skip
        if islands > 1:
            command.append(f"islands.count={islands}")
        environ = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=3600
        )
        if done.returncode:
            raise SystemExit(f"{row}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        run = Path(folder) / "runs" / "run"
        run = run / "island-0" if islands > 1 else run
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    loss = [e["loss"] for e in events if e["event"] == "validated"][-1]
    rounds = [e for e in events if e["event"] == "round_committed"]
    tokens = sum(e["tokens"] for e in rounds)
    sent = sum(e["sent_bytes"] for e in rounds)
    return {
        "validation_loss": loss,
        "sent_bytes_per_token": sent / tokens if tokens else None,
        "rounds": len(rounds),
        "refused": sum(len(e["refused"]) for e in rounds),
        "wall_s": round(time.monotonic() - began_s, 1),
    }


def report(record: dict[str, Any], seeds: int) -> int:
    """The table; 1 if a gate does not hold."""

    def losses(row: str) -> list[float]:
        known = (record["rows"].get(f"{row} | {seed}") for seed in range(seeds))
        return [found["validation_loss"] for found in known if found]

    print(f"\n{record['tokens'] / 1e6:.2f} M tokens, {record['steps']} inner steps, H = {PERIOD}")
    print(f"{'':28}{'loss by seed':28}{'mean':>8}{'to dp':>9}{'bytes/token':>13}")
    base = losses("data parallel")
    for row in ROWS:
        if not (found := losses(row)):
            continue
        sent = record["rows"][f"{row} | 0"]["sent_bytes_per_token"]
        apart = statistics.mean(found) / statistics.mean(base) - 1 if base else float("nan")
        each = " ".join(f"{loss:.4f}" for loss in found)
        sent_text = f"{sent:.1f}" if sent else "–"
        print(f"{row:28}{each:28}{statistics.mean(found):8.4f}{apart:+9.2%}{sent_text:>13}")
    two, streaming = losses("diloco, 2 islands"), losses("streaming e3m0, 2 islands")
    failed = 0
    for what, ours, theirs, limit in (
        ("DiLoCo, 2 islands, beside data parallelism", two, base, 0.02),
        ("streaming in 4 bits beside DiLoCo", streaming, two, 0.005),
    ):
        if ours and len(ours) == len(theirs):
            apart = statistics.mean(ours) / statistics.mean(theirs) - 1
            verdict = "pass" if apart <= limit else "FAIL"
            failed += verdict == "FAIL"
            print(f"{what}: {apart:+.2%} {verdict} (≤ {limit:.1%})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
