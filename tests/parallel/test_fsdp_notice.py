"""Of a model that fsdp gathers block by block nothing is said; else how much comes at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.parallel.data_parallel.fsdp import _no_blocks_notice


def said(module: nn.Module, units: list[nn.Module]) -> list[str]:
    program: Any = SimpleNamespace(plan=Plan(Layout(dp_shard=2, zero=3), 8), module=module)
    return _no_blocks_notice(program, units)


def test_a_root_without_weights_is_no_reason_for_a_line() -> None:
    """It said that 0 B are gathered at once."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    assert not said(model, list(model))


def test_layers_without_blocks_are_one_piece() -> None:
    (line,) = said(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), [])
    assert "so 120 B are gathered at once" in line


def test_small_blocks_that_are_gathered_together_need_no_line() -> None:
    small = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(32)])
    assert not said(small, [])
    assert said(small[:31], [])
