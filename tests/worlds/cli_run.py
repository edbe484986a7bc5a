"""Runs the real `shoal train` in a folder of its own, with the user's modules that tests need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import shared
from shoal.launch.processes import can_fork

OWN_LOOP = """
import time, torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
drawn = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(200, 8, generator=drawn), torch.randint(0, 4, (200,), generator=drawn))
run = shoal.parallelize(
    model, lambda p: torch.optim.AdamW(p, lr=1e-3),
    lambda y, t: (nn.functional.cross_entropy(y, t, reduction="sum"), len(t)),
    layout="zero2", batch=16, micro_batch=4, folder="run", precision="fp32")
"""
"""The beginning of a script with a loop of its own: 200 samples, a run in `run`."""

TOY = '''
import time, torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1),
                                 nn.BatchNorm1d(width), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 4))
    def forward(self, x):
        return self.net(x)

def build(width=32):
    return Toy(width)

class Slow:
    """Each sample sleeps, so that a signal can land inside a step."""
    def __init__(self, samples=70, sleep_s=0.01):
        self.samples, self.sleep_s = samples, sleep_s
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator) + 0.01 * torch.randn(8), torch.tensor(index % 4)

def data():
    return Slow(), Slow(8, 0.0)

class Counted(Slow):
    """Says of each sample in the file `held-out-read` that it was read."""
    def __getitem__(self, index):
        with open("held-out-read", "a") as file:
            file.write(".")
        return super().__getitem__(index)

def slow_to_validate():
    return Slow(sleep_s=0.0), Counted(4000, 0.02)

def lists():
    torch.manual_seed(0)  # the samples are drawn: without a seed each rank has others
    return [Slow()[i] for i in range(20)], [Slow()[i] for i in range(9)]

class Poisoned(Slow):
    """Sample 13 turns the loss into NaN."""
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x * float("nan"), y) if index == 13 else (x, y)

def poisoned():
    return Poisoned(sleep_s=0.0), Slow(8, 0.0)

class AllPoison(Slow):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * float("nan"), y

def all_poison():
    return AllPoison(sleep_s=0.0)

def broken():
    raise RuntimeError("the builder broke on purpose")

def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
'''

TOY_ARGUMENTS = [
    "model.build=toy:build", "data.source=toy:data", "train.batch=16", "train.micro_batch=2",
    "train.steps=12", "checkpoint.every=3", "checkpoint.keep=3", "precision.compute=fp32",
    "train.prove=off",  # has its own tests, and several of these runs are broken on purpose
]  # fmt: skip


def outside() -> dict[str, str]:
    """This environment, as it is where no launcher started anything."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}


class CommandLine:
    """`shoal train` as a process; the run is called `run` and lies in `folder/runs/run`.

    cold   nothing is known of this machine, its texts and the model's proof from other commands, and
           nothing is imported; else it is a fork of one process that has imported what trains
    first  of a fork: a module that it imports before all else
    """

    def __init__(
        self, folder: Path, *arguments: str, name: str = "run", cold: bool = False, first: str = ""
    ) -> None:
        (folder / "toy.py").write_text(TOY)
        self.folder = folder
        self.run = folder / "runs" / name
        if not any(a == "--resume" for a in arguments):
            arguments = (*arguments, f"run.name={name}")
        words = ["-m", "shoal", "train", *arguments]
        self.process: Any = (
            subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**outside(), "SHOAL_CACHE": str(folder / "cache")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if cold or not can_fork()
            else shared().start(words, {"SHOAL_TEST_FIRST": first}, folder, merged=True)
        )

    def finish(self, deadline_s: float = 300.0) -> tuple[int, str]:
        """(exit code, output) once it ended."""
        try:
            output, _ = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"still running after {deadline_s} s:\n{output}") from None
        return self.process.returncode, output

    def wait_for(self, ready: Callable[[], bool], deadline_s: float = 180.0) -> None:
        """Poll until `ready()`, or fail with the output."""
        until_s = time.monotonic() + deadline_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until_s:
                code, output = self.finish(5)
                raise AssertionError(f"ended with {code} before it was ready:\n{output}")
            time.sleep(0.01)

    def steps(self) -> int:
        """Committed steps so far."""
        return len(lines(self.run / "metrics.jsonl"))

    def pids(self) -> dict[int, int]:
        """Process of each rank, of the newest attempt."""
        return {e["rank"]: e["pid"] for e in self.events("worker_started")}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of one kind so far."""
        return [e for e in lines(self.run / "events.jsonl") if e["event"] == name]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        os.kill(self.pids()[rank], number)


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, a half-written last one left out."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def trajectory(run: Path) -> list[tuple[int, float, float, list[int]]]:
    """(step, loss, gradient norm, samples) of every committed step, with all digits."""
    rows = lines(run / "metrics.jsonl")
    return [(r["step"], r["loss"], r["grad_norm"], r["samples"]) for r in rows]


def final_hashes(run: Path) -> dict[str, Any]:
    """Digest of every slice of the newest checkpoint's tensors, by name."""
    from shoal.checkpoint.format.listing import list_checkpoints, read_manifest

    manifest = read_manifest(list_checkpoints(run / "checkpoints")[0].path)
    return {n: [s.sha256 for s in t.slices] for n, t in manifest.tensors.items()}
