"""Models of the proof of owners, and the hook that ends one of its runs at an accuracy."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

ACCURACY = "OWNERS_PROOF_ACCURACY"
"""Variable of the environment: the validation accuracy, 0 … 1, after which a run stops."""


def logistic() -> nn.Module:
    """Logistic regression on images of 8 × 8: 650 numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """Two convolutions and a linear layer: 3,978 numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def groupnorm() -> nn.Module:
    """The same convolutions with GroupNorm and average pooling: 4,026 numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def stop_at_accuracy(event: dict[str, Any]) -> str | None:
    """Stop the run after a validation that reaches the accuracy."""
    wanted = float(os.environ.get(ACCURACY, "2"))
    reached = event.get("event") == "validated" and event.get("accuracy", 0.0) >= wanted
    return "stop" if reached else None
