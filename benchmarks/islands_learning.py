"""How well islands learn: validation loss of DiLoCo's family beside data parallelism, equal tokens.

A Llama of about 80,000 parameters on the standard library's text, trained by the real command, 61
tokens per parameter. Every row sees the same tokens in the same number of steps of the same size in
sum: data parallelism takes steps of 32 samples, 2 islands of 16 each, 4 islands of 8 each. As in
DiLoCo's paper, where a run of 88,000 steps was one for its first 24,000, islands go on from a run
that was one for a quarter of its steps; a row without that beginning stands beside them. Learning
rates, schedule, betas and outer settings were chosen on seeds 7 to 9, the rows are of seeds 0 to 2.

    python benchmarks/islands_learning.py            about 20 minutes on 2 cores
    python benchmarks/islands_learning.py --seeds 1 --steps 240      does it work?

Gates: DiLoCo with 2 islands within 2 % of data parallelism, streaming in 4 bits within 0.5 % of
DiLoCo, in the mean over seeds. Writes benchmarks/results/islands-learning.json, resumable by row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from processes import machine

TARGET = Path(__file__).resolve().parent / "results" / "islands-learning.json"
SEQUENCE, PERIOD, SAMPLES, TOGETHER = 128, 30, 32, 0.25
MODEL = (
    "model.dim=48", "model.layers=2", "model.heads=4", "model.kv_heads=4", "data.tokenizer=bpe:512",
    f"data.sequence={SEQUENCE}", "optimizer.lr=24e-3", "optimizer.schedule=linear",
    "optimizer.betas=[0.9,0.99]", "train.micro_batch=8", "train.prove=off",
    "precision.compute=fp32",
)  # fmt: skip
ALONE = ("layout.strategy=single", "launch.processes=1", "checkpoint.keep=2", "checkpoint.every=0")
OUTER = ("islands.outer_lr=0.8", "islands.outer_momentum=0.6")
EQUAL = (*ALONE, *OUTER, "islands.pace=equal", f"islands.period={PERIOD}")


class Row(NamedTuple):
    """How many islands, what is said to the command, and whether they are one run at first."""

    islands: int
    words: tuple[str, ...]
    together: bool = True


ROWS = {
    "data parallel": Row(1, ("layout.strategy=ddp", "launch.processes=2"), together=False),
    "diloco, 2 islands": Row(2, ("islands.method=diloco", *EQUAL)),
    "streaming e3m0, 2 islands": Row(2, ("islands.method=streaming-diloco", *EQUAL)),
    "diloco, 4 islands": Row(4, ("islands.method=diloco", *EQUAL)),
    "diloco, 2 islands, from the first step": Row(
        2, ("islands.method=diloco", *EQUAL), together=False
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--steps", type=int, default=1200, help="inner steps of every row")
    parser.add_argument("--rows", default="", help="comma-separated numbers of rows; default: all")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    chosen = [list(ROWS)[int(n)] for n in options.rows.split(",")] if options.rows else list(ROWS)
    record = {"rows": {}, "steps": options.steps, "arguments": [*MODEL, *EQUAL]}
    if options.out.exists():
        known = json.loads(options.out.read_text())
        alike = all(known[key] == record[key] for key in ("steps", "arguments"))
        record = known if alike else record
    for seed in seeds:
        with tempfile.TemporaryDirectory() as work:
            for row in chosen:
                key = f"{row} | {seed}"
                if key not in record["rows"]:
                    record["rows"][key] = train(row, seed, options.steps, Path(work))
                    record["machine"] = machine()
                    record["tokens"] = options.steps * SAMPLES * SEQUENCE
                    record["together_steps"] = together_steps(options.steps)
                    options.out.write_text(json.dumps(record, indent=1) + "\n")
                    print(key, record["rows"][key], flush=True)
    return report(record, seeds)


def together_steps(steps: int) -> int:
    """Steps of the run that islands go on from, whole rounds."""
    return round(TOGETHER * steps / PERIOD) * PERIOD


def train(name: str, seed: int, steps: int, work: Path) -> dict[str, Any]:
    """One run of the command: its validation loss, and what an island sent.

    work   a folder where the run of data parallelism of this seed lies, or will
    """
    row, began_s = ROWS[name], time.monotonic()
    together = together_steps(steps)
    words = [
        f"train.seed={seed}", f"train.steps={steps}", f"train.batch={SAMPLES // row.islands}",
    ]  # fmt: skip
    if row.islands == 1:
        kept = (f"checkpoint.every={together}", "checkpoint.keep=9")
        return outcome(shoal(work / "one", [*MODEL, *row.words, *words, *kept]), began_s)
    words += [*row.words, f"islands.count={row.islands}"]
    with tempfile.TemporaryDirectory() as folder:
        if not row.together:
            return outcome(shoal(Path(folder), [*MODEL, *words]), began_s)
        if not (work / "one").exists():
            train("data parallel", seed, steps, work)
        run = Path(folder) / "runs" / "run"
        shutil.copytree(work / "one" / "runs" / "run", run)
        for checkpoint in (run / "checkpoints").iterdir():
            if checkpoint.name != f"step-{together}":
                shutil.rmtree(checkpoint)
        return outcome(shoal(Path(folder), ["--resume", "runs/run", *words]), began_s)


def shoal(folder: Path, words: list[str]) -> Path:
    """Train in a folder; gives the folder of the run, or of its first island."""
    folder.mkdir(exist_ok=True)
    named = [] if "--resume" in words else ["run.name=run"]
    command = [sys.executable, "-m", "shoal", "train", *words, *named]
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise SystemExit(f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    run = folder / "runs" / "run"
    return run / "island-0" if (run / "island-0").exists() else run


def outcome(run: Path, began_s: float) -> dict[str, Any]:
    """What a run ended with; bytes per token are those of its rounds."""
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


def report(record: dict[str, Any], seeds: list[int]) -> int:
    """The table; 1 if a gate does not hold."""

    def losses(row: str) -> list[float]:
        known = (record["rows"].get(f"{row} | {seed}") for seed in seeds)
        return [found["validation_loss"] for found in known if found]

    print(
        f"\n{record['tokens'] / 1e6:.2f} M tokens, {record['steps']} inner steps, H = {PERIOD}, "
        f"one run for {record['together_steps']} steps"
    )
    print(f"{'':40}{'loss by seed':28}{'mean':>8}{'to dp':>9}{'bytes/token':>13}")
    base = losses("data parallel")
    for row in ROWS:
        if not (found := losses(row)):
            continue
        sent = record["rows"][f"{row} | {seeds[0]}"]["sent_bytes_per_token"]
        apart = statistics.mean(found) / statistics.mean(base) - 1 if base else float("nan")
        each = " ".join(f"{loss:.4f}" for loss in found)
        sent_text = f"{sent:.1f}" if sent else "–"
        print(f"{row:40}{each:28}{statistics.mean(found):8.4f}{apart:+9.2%}{sent_text:>13}")
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
