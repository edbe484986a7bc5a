"""Ranks that get the same batches hear of it in one line, and train on; others hear nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import shoal.neighbours.deepspeed
import deepspeed, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
rows = {rows}
data = TensorDataset(rows)
model = torch.nn.Linear(8, 1)
config = {{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
          "optimizer": {{"type": "SGD", "params": {{"lr": 0.01}}}}, "zero_optimization": {{"stage": {stage}}}}}
engine, _, loader, _ = deepspeed.initialize(model=model, config=config{more})
loader = loader or {loader}
for (batch,) in loader:
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
assert engine.global_steps >= 3
engine.destroy()
"""
ROWS, PLAIN = "torch.randn(16, 8)", "DataLoader(data, batch_size=2)"
DEALT = "DataLoader(data, batch_size=2, sampler=DistributedSampler(data))"


def lines(
    programs: Any, folder: Path, rows: str, loader: str, more: str = "", stage: int = 0
) -> Any:
    text = SCRIPT.format(rows=rows, loader=loader, more=more, stage=stage)
    (folder / "a.py").write_text(text)
    ended = programs.world(2, "a.py", cwd=folder)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    return [one for one in ended[0].stderr.splitlines() if "the same samples" in one]


def test_a_plain_loader_is_one_line(programs: Any, tmp_path: Path) -> None:
    (line,) = lines(programs, tmp_path, ROWS, PLAIN)
    assert "step 1: ranks 0 and 1 got the same samples" in line
    assert "training goes on; try: initialize(training_data=dataset), or DataLoader" in line


def test_a_distributed_sampler_is_silent(programs: Any, tmp_path: Path) -> None:
    assert not lines(programs, tmp_path, ROWS, DEALT)


@pytest.mark.proof("faults")
@pytest.mark.parametrize(
    ("rows", "loader", "more", "said"),
    [
        ("torch.ones(16, 8)", PLAIN, "", 0),  # all samples are alike
        (ROWS, "None", ", training_data=data", 0),
        (ROWS, "[(rows[k : k + 2],) for k in range(0, 8, 2)]", "", 1),  # a loop without a loader
        ("torch.randint(0, 2, (16, 8)).float()", PLAIN, "", 1),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_others(
    programs: Any, tmp_path: Path, rows: str, loader: str, more: str, said: int, stage: int
) -> None:
    assert len(lines(programs, tmp_path, rows, loader, more, stage)) == said


ACCELERATE = """
import shoal.neighbours.accelerate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for (batch,) in {loader}:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("loader", "said"), [("loader", 1), ("accelerator.prepare(loader)", 0)])
def test_a_loader_that_accelerate_did_not_prepare(
    programs: Any, tmp_path: Path, loader: str, said: int
) -> None:
    (tmp_path / "a.py").write_text(ACCELERATE.format(loader=loader))
    ended = programs.world(2, "a.py", cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    lines = [one for one in ended[0].stderr.splitlines() if "the same samples" in one]
    assert len(lines) == said
    assert all("try: accelerator.prepare(dataloader)" in one for one in lines)
