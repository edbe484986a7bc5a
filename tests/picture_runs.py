"""Make the run folders that the pictures of the documentation are drawn from: docs/pictures/runs.

    python tests/picture_runs.py [NAME …]       # then make pictures

Two runs of four ranks train a small Llama on pages of this documentation. In `slow-data` the data
of rank 1 sleep, and the verdict names them; `fast-data` is the same run without these sleeps. A
forward pass sleeps in both, since four ranks share the cores of one machine. Names of this machine
are replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "pictures" / "runs"
SLOW, FAST = "slow-data", "fast-data"
KEPT = ("metrics.jsonl", "events.jsonl", "plan.json", "run.toml", "ranks.json", "rank_steps")
STEP = 140
"""The step whose samples `data-look.json` has."""
SHOWN, KEPT_LETTERS = 3, 80
SLOW_ROWS = '''
"""Rows that rank 1 reads slowly, and passes that take at least some time."""

import os
import time

import torch

RANK = int(os.environ.get("RANK", "0"))
PASS_S, LATE_S = 0.1, 0.12


def collate(samples):
    """Join samples to a batch; rank 1 waits first, as for a slow disk."""
    if RANK == 1 and os.environ["SLEEPS"] == "yes":
        time.sleep(LATE_S)
    return torch.utils.data.default_collate(samples)


def spend(module, inputs):
    """Sleep in the forward pass of the whole model."""
    if type(module).__name__ == "Llama" and module.training:
        time.sleep(PASS_S)


torch.nn.modules.module.register_module_forward_pre_hook(spend)
'''
ARGUMENTS = (
    "data.source=mix:0.7*text:guide/*.md+0.3*text:recipes/*.md", "data.tokenizer=bpe:1024",
    "data.sequence=48", "data.collate=slow_rows:collate", "model.dim=64", "model.layers=2",
    "model.heads=4", "train.batch=16", "train.micro_batch=4", "train.steps=160",
    "train.validate_every=40", "optimizer.lr=0.004", "checkpoint.every=40", "train.prove=off",
    "precision.compute=fp32", "launch.processes=4", "layout.strategy=ddp",
)  # fmt: skip


def run_shoal(folder: Path, *words: str) -> str:
    """Run a command of Shoal in a folder; return its output."""
    more = {"PYTHONPATH": str(folder), "SLEEPS": "no" if f"run.name={FAST}" in words else "yes"}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words], cwd=folder, check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, **more},
    )  # fmt: skip
    return done.stdout


def keep_run(run: Path, work: Path) -> Path:
    """Copy the records of a run, without checkpoints and without names of this machine."""
    kept = RUNS / run.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in KEPT:
        one = run / name
        if one.is_dir():
            shutil.copytree(one, kept / name)
        elif one.exists():
            text = one.read_text(encoding="utf-8")
            text = text.replace(f"{work}/", "").replace(str(work), ".")
            (kept / name).write_text(text.replace(socket.gethostname(), "node-0"), encoding="utf-8")
    return kept


def keep_start(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first segments of a text with `KEPT_LETTERS` letters in all."""
    kept, room = [], KEPT_LETTERS
    for segment in segments:
        if room > 0:
            kept.append({**segment, "text": segment["text"][:room]})
            room -= len(segment["text"])
    return kept


def keep_samples(document: dict[str, Any]) -> None:
    """Write the samples of a step; those of a small loss with the start of their texts."""
    document["rows"].sort(key=lambda row: -row["loss"])
    for place, row in enumerate(document["rows"]):
        if place >= SHOWN:
            for name in ("input_ids", "labels", "position_ids", "attention_mask", "tokens"):
                row.pop(name, None)
            row["segments"] = keep_start(row["segments"])
    text = json.dumps(document, ensure_ascii=False, indent=1)
    (RUNS / "data-look.json").write_text(f"{text}\n", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Make the runs, and of the slow one the samples of a step."""
    from shoal.report.verdict import find_verdict

    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        for name, pages in (("guide", "how-it-works"), ("recipes", "recipes")):
            shutil.copytree(ROOT / "docs" / pages, work / name)
        (work / "slow_rows.py").write_text(SLOW_ROWS, encoding="utf-8")
        for name in names:
            run_shoal(work, "train", *ARGUMENTS, f"run.name={name}")
            print(find_verdict(work / "runs" / name).line())
            if name == SLOW:
                look = ("data", "look", f"runs/{name}", "--step", str(STEP), "--json", "--trust")
                keep_samples(json.loads(run_shoal(work, *look)))
            keep_run(work / "runs" / name, work)


if __name__ == "__main__":
    main(sys.argv[1:] or (SLOW, FAST))
