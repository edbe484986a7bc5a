"""What of a record is a curve: names and numbers, and the step that they are of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CURVES = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s", "loss_scale")
"""Keys of a step's row that are drawn."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Find the numbers of a record to draw, by name: train/loss, train/NAME, validation/NAME.

    record   of rank 0; others and records without numbers give {}, as do numbers that are not
             finite
    """
    kind = {"step": "train", "validated": "validation"}.get(str(record.get("event")))
    if kind is None or record.get("rank") != 0:
        return {}
    keys = CURVES if kind == "train" else ("loss", "accuracy")
    found = {key: record.get(key) for key in keys} | dict(record.get("metrics") or {})
    return {
        f"{kind}/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def missing(package: str, what: str) -> str:
    """The line for a library that is not installed."""
    return f"{what}: needs {package}, which is not installed; nearest: pip install {package}"
