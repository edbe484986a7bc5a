"""Lets the tests of this folder share `trainer_small`, and a whole run in this process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import start
from shoal.fabric import start_world
from shoal.proof.start_proof import prove_run
from shoal.trainer.main_job import train

sys.path.insert(0, str(Path(__file__).parent))

MODULE = """
import torch
from torch import nn
def build(): return nn.Linear(4, 3)
def data(): return [(torch.ones(4) * i, torch.tensor(i % 3)) for i in range(12)]
def strings(): return [("a text", "b text") for i in range(12)]
def no_count(outputs, targets): return outputs.sum() * 0.0, torch.tensor(0.0)
def nan(outputs, targets): return outputs.sum() * float("nan"), torch.tensor(1.0)
def half(outputs, targets):
    bad = float("nan") if targets[0] == 0 else 1.0
    return outputs.square().sum() * bad, torch.tensor(float(len(targets)))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measuring the machine takes seconds: once for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepares and trains a run of four steps in this process; gives folder and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(cache))
    (tmp_path / "my_ends.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "my_ends", raising=False)

    def one(*overrides: str, before: Any = None) -> tuple[Path, int]:
        base = ["model.build=my_ends:build", "data.source=my_ends:data", "train.batch=2",
                "train.steps=4", "layout.strategy=single", "run.name=x"]  # fmt: skip
        prepared = start.prepare_run([*base, *overrides], None, 1)
        prepared.folder.mkdir(parents=True)
        start.write_run_folder(prepared)
        if before is not None:
            before(prepared.folder)
        return prepared.folder, train(prepared.folder, prove_run, world=start_world({}))

    return one
