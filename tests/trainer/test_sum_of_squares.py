"""The gradient's norm is as exact in one large buffer as in many small tensors."""

from __future__ import annotations

import pytest
import torch

from shoal.trainer.step import sum_of_squares


def test_large_fp32_buffers_keep_their_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(3_000_001, generator=generator)
    flat[::7] *= 100.0
    true = float(flat.double().square().sum())
    assert abs(float(sum_of_squares([flat])) / true - 1) < 1e-6
    parts = list(flat.split(1000))
    assert abs(float(sum_of_squares(parts)) / true - 1) < 1e-6


def test_any_shape_and_nothing() -> None:
    assert float(sum_of_squares([])) == 0.0
    odd = torch.ones(3, 5, 7).transpose(0, 2)
    assert float(sum_of_squares([odd, torch.tensor(2.0), torch.empty(0)])) == pytest.approx(105 + 4)
    assert torch.isnan(sum_of_squares([torch.tensor([float("nan")])]))
    assert sum_of_squares([torch.ones(9000, dtype=torch.float64)]).dtype == torch.float64
