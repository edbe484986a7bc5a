"""A model larger than its device: built, trained, saved, resumed on another layout, and exported."""

from __future__ import annotations

import pytest
from larger import MODEL, ROWS, WIDTHS, check, trained

SMALL = {"dim": 128, "layers": 48, "heads": 4, "kv_heads": 4, "tied": False}
"""38 MiB: what a start and a step's rows take of it is the same part as of the matrix' model."""


@pytest.mark.proof
def test_another_layout_goes_on_from_what_it_saved(library: str) -> None:
    check(trained(library, 4, "sgd", ["fsdp", {"tp": 2, "dp_shard": 2}], model=SMALL))


@pytest.mark.proof
def test_a_device_holds_its_share_and_the_root_to_the_byte(library: str) -> None:
    """In float64 what is in no block is the largest unit, and is cut last: nothing may be beside."""
    small = {**MODEL, "dim": WIDTHS["fp64"], "layers": 6}
    check(trained(library, 2, "sgd", ["fsdp"], precision="fp64", model=small, limit_bytes=2**25))


@pytest.mark.proof
@pytest.mark.parametrize("name", list(ROWS))
def test_every_layout_trains_it(library: str, name: str) -> None:
    check(trained(library, *ROWS[name]))
