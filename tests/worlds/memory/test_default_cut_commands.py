"""The default micro-batch by whole commands, from one process to four and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_run import CommandLine, trajectory

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


@pytest.mark.proof("share")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_no_sample_is_lost_or_doubled(tmp_path: Path, strategy: str) -> None:
    """Two epochs of 120 samples in steps of 24, and other ranks after every second step."""
    (tmp_path / "counting.py").write_text(COUNTING)
    samples: list[int] = []
    sizes = [24, 12, 8, 6, 6]
    for number, processes in enumerate((1, 2, 3, 4, 1)):
        layout = f"layout.strategy={strategy if processes > 1 else 'single'}"
        passes, output = leg(tmp_path, processes, 2 * number + 2, layout)
        assert {len(ids) for ids in passes} == {sizes[number]}
        changed = sizes[number] != sizes[max(number - 1, 0)]
        assert ("masks of dropout and statistics of BatchNorm" in output) == changed, output
        samples += [one for ids in passes for one in ids]
    assert [row[0] for row in trajectory(tmp_path / "runs" / "run")] == list(range(1, 11))
    for epoch in (samples[:120], samples[120:]):
        assert sorted(epoch) == list(range(120))
