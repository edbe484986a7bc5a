"""A first batch of 90 seconds and a compilation of 60 are no hang: no line, no event, status 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SLOW = """
import os, time
import torch
from torch import nn

LATE = os.environ.get("RANK") in {ranks!r}.split()


class Rows:
    \"\"\"A dataset whose first row on a late rank takes long, as a cold network disk does.\"\"\"

    def __init__(self):
        self.waited = False

    def __len__(self):
        return 640

    def __getitem__(self, index):
        if {batch_s} and LATE and not self.waited and os.path.exists("runs/a/events.jsonl"):
            if "compute_started" in open("runs/a/events.jsonl").read():
                self.waited = True
                open(f"waited-{{os.environ['RANK']}}", "w").close()
                time.sleep({batch_s})
        return torch.full((4,), index / 640), torch.tensor(index % 3)


def compiler(graph, examples):
    \"\"\"A compiler of {compile_s} seconds on a late rank.\"\"\"
    if {compile_s} and LATE:
        open(f"waited-{{os.environ['RANK']}}", "w").close()
        time.sleep({compile_s})
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        if {compile_s}:
            self.blocks[1].compile(backend=compiler)

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def build(): return Net()
def data(): return Rows()
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [("1", "ddp"), ("0 1", "ddp"), ("1", "fsdp")],
    ids=["one rank", "both ranks", "one rank, fsdp"],
)
@pytest.mark.parametrize(("batch_s", "compile_s"), [(90, 0), (0, 60)], ids=["batch", "compile"])
def test_a_slow_start_is_no_hang(
    programs: Any, tmp_path: Path, batch_s: int, compile_s: int, ranks: str, layout: str
) -> None:
    text = SLOW.format(batch_s=batch_s, compile_s=compile_s, ranks=ranks)
    (tmp_path / "slow.py").write_text(text)
    done = programs.run(
        "-m", "shoal", "train", "model.build=slow:build", "data.source=slow:data",
        "train.steps=4", "train.batch=8", "train.micro_batch=4", "launch.processes=2",
        f"layout.strategy={layout}", "train.prove=off", "run.name=a", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(list(tmp_path.glob("waited-*"))) == len(ranks.split())
    events = [json.loads(line) for line in (tmp_path / "runs/a/events.jsonl").open()]
    assert not [one for one in events if one["event"] in ("hang", "slow_rank", "worker_died")]
