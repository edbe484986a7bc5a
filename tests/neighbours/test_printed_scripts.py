"""The printed scripts, unchanged between lines before and after, on 1, 2 and 4 processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proof_rows import chosen

HERE = Path(__file__).parent
FP16 = ',\n    "fp16": {"enabled": True}'
TOLERANCE = {"fp16": 2e-5, "fp32": 3e-8}
"""Of weights after ten updates at a rate of 1e-4: halves are rounded, and added up in other orders."""


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """Weights as plain torch learns them in float32, whole batches on one process."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(320, 8, generator=generator)
    labels = torch.randint(0, 4, (320,), generator=generator)
    parameters = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)  # DeepSpeed's default
    for at in range(0, 320, 32):
        outputs = last(torch.relu(first(inputs[at : at + 32])))
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels[at : at + 32]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    names = ("first.weight", "first.bias", "last.weight", "last.bias")
    return dict(zip(names, (p.detach() for p in parameters), strict=True))


@pytest.mark.parametrize(
    ("compute", "stage", "size"),
    chosen(
        [*(("fp16", 2, size) for size in (1, 2, 4)), *(("fp32", stage, 2) for stage in range(4))],
        [("fp16", 2, 2), ("fp32", 0, 2), ("fp32", 1, 2), ("fp32", 3, 2)],
    ),
)
def test_the_printed_script_equals_one_process(
    programs: Any,
    tmp_path: Path,
    plain: dict[str, torch.Tensor],
    compute: str,
    stage: int,
    size: int,
) -> None:
    text = (HERE / "printed_deepspeed.py").read_text()
    if compute == "fp32":  # its own keys aside, to see the bits
        text = text.replace(FP16, "").replace('"stage": 2', f'"stage": {stage}')
    if not stage:
        text = text.replace('"device": "cpu"', '"device": "none"')
    (tmp_path / "train.py").write_text(text)
    ended: list[subprocess.CompletedProcess[str]] = programs.world(
        size, "train.py", "found.json", cwd=tmp_path
    )
    assert [one.returncode for one in ended] == [0] * size, ended[0].stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["steps"], found["installed"]) == (10, "None")
    for name, wanted in plain.items():
        apart = float((torch.tensor(found["weights"][name]) - wanted).abs().max())
        assert apart <= TOLERANCE[compute], (name, apart)
    said = [line for one in ended for line in one.stderr.splitlines()]
    assert sum("taken for deepspeed.initialize" in line for line in said) == 1, said
    assert any("gradient_clipping is not said: 1.0" in line for line in said), said


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.proof)])
def test_the_printed_ddp_script_runs_without_cuda(programs: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "train.py").write_text((HERE / "printed_ddp.py").read_text())
    ended = programs.world(size, "train.py", "found.json", cwd=tmp_path)
    assert [one.returncode for one in ended] == [0] * size, ended[0].stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for name, wanted in in_one_process(size).items():
        apart = float((torch.tensor(found[name]) - wanted).abs().max())
        assert apart <= 1e-6, (name, apart)  # AdamW, eps 1e-8: rounding of sums over ranks
    for one in ended:
        assert one.stderr.count("no CUDA device is here") == 1, one.stderr
    assert ended[0].stdout.count("Epoch 1, Loss") == 256 // 32 // size


def in_one_process(size: int) -> dict[str, torch.Tensor]:
    """What the DDP script learns on `size` ranks, as plain torch does on one."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, 8, generator=generator)
    labels = torch.randint(0, 4, (256,), generator=generator)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    module = nn.ModuleDict({"first": first, "last": last})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for epoch in range(2):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
        for at in range(0, 256, 32 * size):
            rows = order[at : at + 32 * size]
            optimizer.zero_grad()
            outputs = last(torch.relu(first(inputs[rows])))
            nn.functional.cross_entropy(outputs, labels[rows]).backward()
            optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}
