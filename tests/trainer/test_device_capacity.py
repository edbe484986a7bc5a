"""The default micro-batch is bounded by the memory of the rank's device, measured or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.trainer.autotune import micro_batch_size


def test_an_unknown_device_counts_with_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a measurement it has the catalogue's figure, which may be larger."""
    shape = own_shape(
        "llama", {"dim": 512, "layers": 8, "heads": 8}, vocabulary=32000, sequence=1024
    )
    facts = transformer_facts(shape, 1024, 4)
    monkeypatch.setattr(micro_batch_size, "read_measured_cluster", lambda *_: None)
    monkeypatch.setattr(micro_batch_size, "is_accelerator", lambda _: True)
    world: Any = SimpleNamespace(
        is_first=True, size=1, device=torch.device("cpu"), broadcast_json=lambda told: told
    )
    sizes = []
    for memory_bytes in (1e12, 6e9):
        monkeypatch.setattr(micro_batch_size, "total_bytes", lambda _, m=memory_bytes: m)
        plan, line = micro_batch_size.choose_size(
            Plan(Layout(), 32, 32, 1, compute="fp32"),
            lambda **_: facts,
            dict,
            world,
            "",
            lambda: None,
        )
        assert not line
        sizes.append(plan.micro_batch)
    assert sizes[0] == 32
    assert sizes[1] < 32
