"""Scripts of `golden.py`'s rows that are no command of ours: loops of one's own, and a door.

`loop.py LAYOUT` trains six steps of a model with dropout through a loader, on each of two ranks;
`door.py` is a script of accelerate's, which prints its losses with all digits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp", "tp2": {"tp": 2}, "pp2": {"pp": 2}}
LOOP = """
import json, sys
import torch, shoal
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(4)
        )
        self.end = nn.Linear(32, 4)

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = x + block(x)
        return self.end(x)

torch.manual_seed(0)
model = Net()
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator)
data = TensorDataset(x, x[:, :4].sin())
run = shoal.parallelize(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.mean_of_samples(nn.MSELoss()),
    json.loads(sys.argv[1]), batch=16, micro_batch=2, clip=1.0, folder="runs/run",
    sample=(x[:2], x[:2, :4].sin()),
)
for batch in run.loader(data):
    run.step(batch)
run.save()
run.close()
"""
DOOR = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator)
data = torch.utils.data.TensorDataset(x, x[:, :4].sin())
loader = torch.utils.data.DataLoader(data, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.print(repr(loss.item()))
accelerator.print([[float(one).hex() for one in p.flatten()] for p in model.parameters()])
accelerator.end_training()
"""


def rows() -> dict[str, list[str]]:
    """Name → the script, and what it is given."""
    loops = {f"own loop {name}": ["loop.py", json.dumps(one)] for name, one in LAYOUTS.items()}
    return {**loops, "door accelerate": ["door.py"]}


def run_script(
    words: list[str], here: Path, environ: dict[str, str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a row's script on two ranks."""
    (here / "loop.py").write_text(LOOP)
    (here / "door.py").write_text(DOOR)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    door = ["-m", "shoal", "run", "--as", "accelerate", "--processes", "2", "--"]
    how = door if words[0] == "door.py" else torchrun
    return subprocess.run(
        [sys.executable, *how, *words], cwd=here, env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=deadline_s, check=False,
    )  # fmt: skip


def printed(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a door's script printed of its losses and weights."""
    lines = ended.stdout.splitlines()
    told = [line for line in lines if line[:1] in "0123456789[" and line[:1]]
    return {"code": ended.returncode, "lines": told}
