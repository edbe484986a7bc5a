"""Peak memory of a run on a CPU beside the forecast at its start: three models, six layouts.

    python benchmarks/peaks.py [--models demo,mlp,gpt] [--layouts single,ddp,…] [--json FILE]

Each row is one `shoal train` of ten steps with its default saves. Measured is the kernel's peak of
resident memory (VmHWM) of the fullest rank; foreseen is `predicted` in plan.json. Both contain what
the process held before its model was built. `own` leaves that out of both. The gate: measured ÷
foreseen within 0.9 … 1.1 in every row. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import SOURCE, machine

STEPS, DEADLINE_S, NEAR = 10, 600, 0.1
MIB = 2**20
LAYOUTS = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "fsdp": 2, "pp": 2}
"""Processes by layout; `--layouts tp,cp` runs on 2 too."""

MLP = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(12)])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        x = torch.randn(2048, generator=torch.Generator().manual_seed(index))
        return x, x

def data():
    return Data(), Data()

def loss(outputs, targets):
    return (outputs - targets) ** 2
"""
MODELS = {
    "demo": [],
    "mlp": ["model.build=mlp:build", "data.source=mlp:data", "model.loss=mlp:loss"],
    "gpt": ["model.name=gpt", "model.dim=384", "model.layers=6", "model.heads=6"],
}
"""Words of a run by model: Shoal's demo, the chain of 50M weights of `resident.py`, and a GPT.

The planner's share of holes was fitted to the first two; the third is a check.
"""


def main() -> None:
    """Run all rows and print a line for each; exit 1 if one is outside of the gate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="keep every figure in this file")
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        for layout in options.layouts.split(","):
            for _ in range(options.rounds):
                rows.append(measure(model, layout))
                print(line_of(rows[-1]), flush=True)
    if options.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(any(abs(row["ratio"] - 1) > NEAR for row in rows))


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return (
        f"{row['model']:5} {row['layout']:7} measured {row['measured'] / MIB:7.0f}  foreseen "
        f"{row['foreseen'] / MIB:7.0f} MiB  measured ÷ foreseen {row['ratio']:.3f}  own "
        f"{row['own']:.3f}"
    )


def measure(model: str, layout: str) -> dict[str, Any]:
    """Train under one layout; return the peaks in bytes and their ratios."""
    processes = LAYOUTS.get(layout, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.py").write_text(MLP)
        command = [
            *(sys.executable, "-m", "shoal", "train", *MODELS[model]),
            *(f"layout.strategy={layout}", f"launch.processes={processes}"),
            *(f"train.batch={8 * processes if model == 'mlp' else 16}", "run.name=a"),
            *(f"train.steps={STEPS}", "train.validate_samples=8", "precision.compute=fp32"),
        ]
        paths = f"{SOURCE}:{name}:{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        run = folder / "runs/a"
        predicted = json.loads((run / "plan.json").read_text())["predicted"]
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    peaks = [one["peak_memory_bytes_by_rank"] for one in events if one["event"] == "memory_peaks"]
    measured, foreseen = max(peaks[-1]), predicted["peak_memory_bytes"]
    held = predicted["memory"].get("context", 0.0)
    return {
        "model": model,
        "layout": layout,
        "measured": measured,
        "foreseen": foreseen,
        "held": held,
        "ratio": measured / foreseen,
        "own": (measured - held) / (foreseen - held),
        "parts": predicted["memory"],
        "by_rank": peaks[-1],
    }


if __name__ == "__main__":
    main()
