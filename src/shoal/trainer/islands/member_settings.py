"""Settings in which islands that come and go are alike, and those in which they may differ.

    alike     the method and its numbers, the batch, the seed, the steps, the data
    unlike    layout, processes, micro-batch, precision: islands exchange canonical units
    own       places and waits

Merged weights are fp64 on all islands or on none: their bits would differ.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.config.differences import UNLIKE
from shoal.trainer.islands.island_data import describe_difference
from shoal.trainer.islands.island_join import shared_settings
from shoal.trainer.run import Run

OWN = ("islands.count", "islands.wait_s", "islands.connections", "islands.key", "islands.keys")
"""Settings of a place, which each island chooses for itself."""

FORMAT, NARROW = "precision.compute", "fp32, bf16 or fp16"
"""Setting that decides whether merged weights are fp64 · its values with which they are fp32."""


def collect_settings(run: Run, policy: IslandsPolicy, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that must be equal on all islands, by their keys in run.toml.

    Args:
        dtype: of the merged weights.
    """
    shared = shared_settings(run, policy)
    alike = {key: shared[key] for key in shared.keys() - {*OWN, "layout", *UNLIKE}}
    return alike | {FORMAT: "fp64" if dtype == torch.float64 else NARROW}


def describe_settings(own: dict[str, Any], other: Any, index: int, name: int) -> str:
    """Return how another island's settings differ from this island's; "" if they agree.

    >>> describe_settings({"train.seed": 4}, {"train.seed": 4}, 0, 2)
    ''
    """
    for key, value in own.items():
        found = other.get(key) if isinstance(other, dict) else None
        if isinstance(value, dict):
            if isinstance(found, dict) and (why := describe_difference(value, found)):
                return f"{key}: {why} (island {name} and island {index}); try: the same data on all"
        elif key == FORMAT and found != value:
            return (
                f"{key} = {found} on island {name}, {value} on island {index}: merged weights are "
                f"fp64 on all islands, or on none; try: {key}=fp32"
            )
        elif found != value:
            near = f"{key}={value}" if "." in key else "the same configuration"
            return (
                f"{key} = {found} on island {name}, {value} on island {index}: islands of a run "
                f"are alike; try: {near}"
            )
    return ""
