"""Loss against bytes: what gradients in codes cost on the real text, and what they save.

Trains a small Llama on the Python standard library's text in 2 processes, from the same weights on
the same samples, once for every way of `layout.compress` and layout, and tells the loss on the held
out part beside the bytes that a rank sends per step. Codes are tried with three seeds, which judge
only: what one-bit does by default was chosen on others (`one_bit.py`).

    python benchmarks/compressing.py --quick    a smoke test of a minute
    python benchmarks/compressing.py            writes benchmarks/results/compressing.json
    python benchmarks/compressing.py --page     prints the table of docs/how-it-works/compress.md of
    that file

Bytes are means over all steps but the first, which asks more. Those of gradients are all-reduce,
reduce-scatter, and the gathering of their codes, without the weights that zero1, zero2 and fsdp
gather as ever.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from processes import machine, run_together

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "compressing.json"
PROCESSES, SEEDS, STEPS = 2, (31, 32, 33), 300
WORDS = ["data.source=stdlib", "data.tokenizer=bpe:512", "data.sequence=64"]
MODEL: dict[str, Any] = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "dropout": 0.0}
BATCH, MICRO_BATCH, VALIDATED, LAST = 16, 2, 512, 20
OPTIMIZER = {"lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0, "warmup": 20}
CASE = ("layout", "compress", "seed")
LAYOUTS = ("fsdp", "ddp", "zero1", "zero2")
CODES = ("none", "int8", "one-bit", "one-bit:100", "one-bit:0", "powersgd:4", "topk:0.01")
ROWS = [
    *(("fsdp", code, seed) for seed in SEEDS for code in ("one-bit", "none", "int8")),
    *(("ddp", code, SEEDS[0]) for code in ("one-bit", "none", "int8")),
    *((layout, code, SEEDS[0]) for layout in ("zero1", "zero2") for code in ("one-bit", "none")),
    *(("ddp", code, seed) for seed in SEEDS[1:] for code in ("one-bit", "int8")),
    *((layout, "one-bit", seed) for seed in SEEDS[1:] for layout in ("zero1", "zero2")),
    *((layout, "int8", seed) for seed in SEEDS for layout in ("zero1", "zero2")),
]
"""What is trained, in the order of what matters most. Without codes layouts are alike to 1e-6, so
fsdp's loss stands for all seeds, and one seed tells what a layout sends."""


def cases(quick: bool) -> list[dict[str, Any]]:
    """What is trained, as JSON."""
    return [dict(zip(CASE, row, strict=True)) for row in (ROWS[:4] if quick else ROWS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: does it all work?")
    parser.add_argument("--page", action="store_true", help="print the page's table instead")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", default=str(OUT), help="where the JSON goes")
    parser.add_argument("--known", help="a file of rows as JSON lines that need not be made again")
    parser.add_argument("--no-more", action="store_true", help="write the known rows, make none")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    if options.page:
        print("\n".join(table(json.loads(Path(options.out).read_text()))))
        return
    steps = 4 if options.quick else options.steps
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/compressing.py", *map(_bare, sys.argv[1:])]),
        "machine": machine(),
        "processes": PROCESSES,
        "data": WORDS,
        "model": MODEL,
        "batch": BATCH,
        "micro_batch": MICRO_BATCH,
        "optimizer": OPTIMIZER,
        "steps": steps,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        wanted = cases(options.quick)
        if options.known:
            known = [json.loads(line) for line in Path(options.known).read_text().splitlines()]
            record["rows"] = [row for row in known if {key: row[key] for key in CASE} in wanted]
            done = [{key: row[key] for key in CASE} for row in record["rows"]]
            wanted = [] if options.no_more else [case for case in wanted if case not in done]
        job = {"out": str(out), "steps": steps, "cases": wanted}
        command = [str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        if wanted:
            run_together(command, PROCESSES, deadline_s=4 * 3600)
            record["rows"] += [json.loads(line) for line in out.read_text().splitlines()]
    print("\n".join(table(record)))
    if not options.quick:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


def _bare(word: str) -> str:
    return Path(word).name if "/" in word else word


def work(job: dict[str, Any]) -> None:
    """As one of the processes: train every case, one after another; rank 0 writes their rows."""
    from torch.utils.data import Subset

    from shoal.config.load import load_config
    from shoal.data.sources import open_source
    from shoal.fabric import start_world

    world = start_world()
    config = load_config(None, WORDS).config
    source = world.run_local_first(lambda: open_source(config.data, 0))
    held = len(source.validation)
    few = range(0, held, max(1, held // VALIDATED))
    for case in job["cases"]:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(world.broadcast_json(folder))
            row = train(world, case, job["steps"], source, Subset(source.validation, few), place)
            world.barrier()
        if world.is_first:
            with Path(job["out"]).open("a") as file:
                file.write(json.dumps({**case, **row}) + "\n")
            print(json.dumps({**case, **row}), file=sys.stderr, flush=True)
    world.close()


def train(
    world: Any, case: dict[str, Any], steps: int, source: Any, held: Any, folder: Path
) -> dict[str, Any]:
    """Train one case and give its losses and bytes."""
    import torch

    import shoal
    from shoal.base.layouts.policies import OptimizerPolicy
    from shoal.models.catalog import build

    def model() -> torch.nn.Module:
        return build("llama", MODEL, vocabulary=source.vocabulary, sequence=64)

    lr, betas = OPTIMIZER["lr"], tuple(OPTIMIZER["betas"])
    run = shoal.parallelize(
        model,
        partial(torch.optim.AdamW, lr=lr, betas=betas, weight_decay=OPTIMIZER["weight_decay"]),
        layout=case["layout"],
        compress=case["compress"],
        seed=case["seed"],
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        clip=OPTIMIZER["clip"],
        precision="fp32",
        schedule=OptimizerPolicy(lr=lr, schedule="cosine", warmup_steps=OPTIMIZER["warmup"]),
        total_steps=steps,
        folder=folder,
        world=world,
    )
    losses: list[float] = []
    began_s = time.perf_counter()
    for batch in run.loader(source.train, collate=source.collate):
        losses.append(run.step(batch).loss)
        if len(losses) == steps:
            break
    took_s = time.perf_counter() - began_s
    loss = run.evaluate(held, collate=source.collate)["loss"]
    parameters = sum(bucket.elements for bucket in run.plan.buckets)
    for undo in run.program.on_close:
        undo()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "validation_loss": loss,
        "train_loss": statistics.fmean(losses[-LAST:]),
        "sent_bytes": {
            kind: statistics.fmean(row["comm_bytes_by_kind"].get(kind, 0) for row in rows[1:])
            for kind in rows[-1]["comm_bytes_by_kind"]
        },
        "parameters": parameters,
        "seconds": round(took_s, 1),
    }


def gradient_bytes(row: dict[str, Any]) -> float:
    """What a rank sent of gradients in a step: under ddp all, else all but gathered weights."""
    sent = row["sent_bytes"]
    weights = 0 if row["layout"] == "ddp" else sent.get("all_gather", 0)
    return sum(sent.values()) - weights


def table(record: dict[str, Any]) -> list[str]:
    """Lines of the page: one per layout and code, losses as means over its seeds.

    "against none" is of the same seeds, by fsdp's loss where the layout has none of that seed.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault((row["layout"], row["compress"]), []).append(row)
    exact = {row["seed"]: row["validation_loss"] for row in found["fsdp", "none"]}
    lines = [
        "| layout | `layout.compress` | seeds | loss | against `none` | KiB of gradients | all |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout, code in sorted(found, key=lambda row: (LAYOUTS.index(row[0]), CODES.index(row[1]))):
        rows = found[layout, code]
        loss = statistics.fmean(row["validation_loss"] for row in rows)
        plain = statistics.fmean(exact[row["seed"]] for row in rows)
        sent, whole = (gradient_bytes(of[0]) / 1024 for of in (rows, found[layout, "none"]))
        total = sum(rows[0]["sent_bytes"].values()) / 1024
        lines.append(
            f"| `{layout}` | `{code}` | {len(rows)} | {loss:.4f} | {loss / plain - 1:+.2%} | "
            f"{sent:.1f} ({sent / whole:.1%}) | {total:.1f} |"
        )
    return lines


if __name__ == "__main__":
    main()
