"""Legs of `shoal train` without a micro-batch, of a model that writes down its samples."""

from __future__ import annotations

import json
from pathlib import Path

from cli_run import CommandLine

COUNTING = '''
import json, os, torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

class Counting(nn.Module):
    """Writes down which samples each forward pass of training has."""
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1),
                                 nn.Linear(16, 4))
    def forward(self, x):
        if self.training and x.device.type == "cpu" and torch.is_grad_enabled():
            ids = [int(round(v)) for v in x[:, 0].tolist()]
            with open("passes.jsonl", "a") as file:
                file.write(json.dumps(ids) + chr(10))
        return self.net(x)

def build():
    return Counting()

def data():
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(120, 8, generator=drawn), torch.randint(0, 4, (120,), generator=drawn)
    x[:, 0] = torch.arange(120)
    whole = TensorDataset(x, y)
    return whole, Subset(whole, range(8))
'''
ARGUMENTS = [
    *("model.build=counting:build", "data.source=counting:data", "train.batch=24", "train.seed=3"),
    *("precision.compute=fp32", "train.prove=off", "checkpoint.every=1000"),
]


def leg(folder: Path, processes: int, steps: int, *words: str) -> tuple[list[list[int]], str]:
    """Train to a step on so many processes; gives the samples of each pass of the last two."""
    passes = folder / "passes.jsonl"
    passes.unlink(missing_ok=True)
    given = ["--resume", "runs/run"] if steps > 2 else ARGUMENTS
    run = CommandLine(
        folder, *given, f"launch.processes={processes}", f"train.steps={steps}", *words
    )
    code, output = run.finish()
    assert code == 0, output
    rows, found = [json.loads(line) for line in passes.read_text().splitlines()], []
    while sum(map(len, found)) < 2 * 24:  # passes before them look at the model
        found.insert(0, rows.pop())
    return found, output
