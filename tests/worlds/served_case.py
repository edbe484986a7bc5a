"""A model for parameter servers whose workers take planned times, and what a run of it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_run import CommandLine, lines

TOY = """
import os, time
import torch
from torch import nn

class Toy(nn.Module):
    '''Rank 0 sleeps `slow` times as long as others in each pass.'''
    def __init__(self, width, sleep_s, slow):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1),
                                 nn.Linear(width, 4))
        self.sleep_s = sleep_s * (slow if os.environ.get("RANK") == "0" else 1)
    def forward(self, x):
        if self.training:
            time.sleep(self.sleep_s)
        return self.net(x)

def build(width=32, sleep_s=0.0, slow=4):
    return Toy(width, sleep_s, slow)

class Data:
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, (x[0] > 0).long() + 2 * (x[1] > 0).long()

def data():
    return Data(640), Data(32)
"""

CLICKS = """
import torch
from torch import nn

class Clicks(nn.Module):
    # Bags of items, a user, dense features: as recommenders have them.
    def __init__(self, users, items, width):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.EmbeddingBag(items, width, mode="sum", padding_idx=0)
        self.dense = nn.Sequential(nn.Linear(6, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 2))
    def forward(self, row):
        user, items, dense = row[:, 0].long(), row[:, 1:6].long(), row[:, 6:]
        return self.top(torch.cat((self.users(user), self.items(items), self.dense(dense)), 1))

def build(users=500, items=2000, width=8):
    return Clicks(users, items, width)

class Data:
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        user = torch.randint(500, (1,), generator=draws)
        items = torch.randint(2000, (5,), generator=draws)
        dense = torch.randn(6, generator=draws)
        return torch.cat((user, items, dense)), (user + items.sum()).remainder(2)[0]

def data():
    return Data(640), Data(32)
"""

ARGUMENTS = [
    "model.build=served:build", "data.source=served:data", "train.batch=16", "train.micro_batch=16",
    "layout.strategy=parameter-server", "train.prove=off", "precision.compute=fp32",
]  # fmt: skip


def start(folder: Path, *arguments: str) -> CommandLine:
    """Begin a run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "served.py").write_text(TOY)
    return CommandLine(folder, *ARGUMENTS, *arguments)


def click(folder: Path, *arguments: str) -> CommandLine:
    """The command of docs/how-it-works/parameter-server.md that trains with tables on a server."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clicks.py").write_text(CLICKS)
    page = Path(__file__).parents[2] / "docs" / "how-it-works" / "parameter-server.md"
    (line,) = [row for row in page.read_text().splitlines() if row.startswith("shoal train model.b")
               and "layout.serves=" in row]  # fmt: skip
    return CommandLine(folder, *line.removeprefix("shoal train ").split(), *arguments)


def committed(run: Path) -> list[list[int]]:
    """Spans of samples of all committed steps, in the order of the stream."""
    return sorted(row["samples"] for row in lines(run / "metrics.jsonl"))


def each_once(run: Path, steps: int) -> bool:
    """Whether every sample of the stream up to the last step was used by one step."""
    spans = committed(run)
    joined = all(one[1] == other[0] for one, other in zip(spans, spans[1:], strict=False))
    return len(spans) == steps and spans[0][0] == 0 and joined


def staleness(run: Path) -> dict[str, Any]:
    """The last event of that name, and the largest of all steps' rows."""
    told = [one for one in lines(run / "events.jsonl") if one["event"] == "staleness"][-1]
    rows = [row["metrics"]["staleness"] for row in lines(run / "metrics.jsonl")]
    return {**json.loads(json.dumps(told)), "largest_of_rows": max(rows)}
