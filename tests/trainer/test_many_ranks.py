"""What ranks tell each other at a start and in a step does not grow with their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forks import Forks

MOST_BYTES, MOST_S = 4 * 2**20, 10.0
PROGRAM = Path(__file__).parent / "many_ranks.py"


LAYOUTS = [
    "zero1",
    pytest.param({"pp": 4, "dp_replicate": 1024}, marks=pytest.mark.proof),
    # torch itself cuts each tensor into 4,096 pieces, which takes most of the time
    pytest.param("fsdp", marks=pytest.mark.proof),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_start_of_4096_ranks(layout: Any, programs: Forks) -> None:
    done = programs.run(str(PROGRAM), json.dumps(layout), timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert sum(said["told_bytes"].values()) <= MOST_BYTES, said["told_bytes"]
    assert (
        said["told_bytes"]["find_differing_rank"] >= 72 * 4
    )  # arguments, layers, structure, optimizer
    assert said["cpu_s"] <= MOST_S
    # Of 300 parameters: whether each was used, and in the first step whether it is cut off.
    assert said["vector_bytes"] <= 16 * 2**10
    assert said["row_bytes"] <= 2**10
