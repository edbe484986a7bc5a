"""A step's fixed cost: the Python calls of Shoal's own source in a step of a small model."""

from __future__ import annotations

import statistics
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import pair, run_of

import shoal
from shoal.trainer.guards import external_writes

OWN = str(Path(shoal.__file__).parent)
MOST = 235
"""277 with contexts of generators, and a vector to be summed over one rank; 206 here by itself, and
222 after tests of the same process that left hooks in torch."""
MOST_BUILTIN = 198
"""Calls of functions in C from Shoal's own source: 202 before ids of weights were kept."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_a_step_of_a_small_model_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps without a check that is due by step or clock: the low median of eleven steps."""
    monkeypatch.setattr(external_writes, "_all", weakref.WeakSet())  # runs of other tests
    layers = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    run = run_of(nn.Sequential(*layers), adamw, shoal.mean_of_samples(nn.MSELoss()), micro_batch=4)
    for _ in range(20):
        run.step(pair(4))
    counts, builtin = [], []
    for _ in range(11):
        batch, seen = pair(4), [0, 0]

        def note(frame: Any, event: str, _argument: Any, seen: list[int] = seen) -> None:
            if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OWN):
                seen[event == "c_call"] += 1

        sys.setprofile(note)
        try:
            run.step(batch)
        finally:
            sys.setprofile(None)
        counts.append(seen[0])
        builtin.append(seen[1])
    run.close()
    assert statistics.median_low(counts) <= MOST, counts
    assert statistics.median_low(builtin) <= MOST_BUILTIN, builtin
