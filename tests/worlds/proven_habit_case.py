"""A habit of the matrix with and without the quick proof, in one world of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from habits import habit_table
from shoal.fabric import World

PROVEN = "proof: "
"""Part of the lines that the proof writes."""


def attempt(world: World, name: str, layout: str, folder: str, prove: str) -> dict[str, Any]:
    """Run a habit as the matrix does; return its answer with the lines of the proof apart.

    Args:
        folder: a new one, so that no proof is known.
        prove: "auto" or "off".
    """
    cache = patch.dict(
        "os.environ", {"SHOAL_CACHE": str(Path(folder) / "cache"), "SHOAL_PROVE": prove}
    )
    with cache:
        found = habit_table.attempt(world, name, layout)
    found["proof"] = [line for line in found["lines"] if PROVEN in line]
    found["lines"] = [line for line in found["lines"] if PROVEN not in line]
    return found
