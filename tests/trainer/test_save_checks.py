"""Lines before a save, and at a resume: what the checkpoint lacks, and layers that are others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.fabric import start_world
from shoal.trainer.metrics_recorder import MetricsRecorder

BATCH = torch.ones(4, 4), torch.ones(4, 2)


def run_of(folder: Path, *between: nn.Module) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 2))
    return shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), lambda o, y: (o - y) ** 2,
        world=start_world({}), folder=folder,
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for name in ("notice", "warn"):
        monkeypatch.setattr(MetricsRecorder, name, lambda recorder, text: lines.append(text))
    return lines


@pytest.mark.parametrize("kept", [False, True])
def test_a_scheduler_that_nothing_saves_is_named_once(
    tmp_path: Path, told: list[str], kept: bool
) -> None:
    run = run_of(tmp_path, nn.Tanh())
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    for _ in range(2):
        run.step(BATCH)
        scheduler.step()
        run.save(extra={"schedule": scheduler} if kept else None)
    run.close()
    lines = [line for line in told if "LambdaLR sets the optimizer's rate" in line]
    assert len(lines) == (not kept)


def test_other_layers_of_equal_shapes_are_named_by_a_restore(
    tmp_path: Path, told: list[str]
) -> None:
    run = run_of(tmp_path, nn.Tanh(), nn.ReLU())
    run.step(BATCH)
    run.save()
    run.close()
    for layers, named in (([nn.Tanh(), nn.ReLU()], False), ([nn.ReLU(), nn.Tanh()], True)):
        told.clear()
        run = run_of(tmp_path, *layers)
        assert run.restore()
        run.close()
        assert any("layer 1: Tanh → ReLU" in line for line in told) == named
