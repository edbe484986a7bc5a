"""A model larger than its device: built, trained, saved, resumed on another layout, and exported."""

from __future__ import annotations

import pytest
from larger import ROWS, check, trained

SMALL = {"dim": 128, "layers": 48, "heads": 4, "kv_heads": 4, "tied": False}
"""38 MiB: what a start and a step's rows take of it is the same part as of the matrix' model."""


@pytest.mark.proof
def test_another_layout_goes_on_from_what_it_saved(library: str) -> None:
    check(trained(library, 4, "sgd", ["fsdp", {"tp": 2, "dp_shard": 2}], model=SMALL))


@pytest.mark.proof
@pytest.mark.parametrize("name", list(ROWS))
def test_every_layout_trains_it(library: str, name: str) -> None:
    check(trained(library, *ROWS[name]))
