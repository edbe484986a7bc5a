"""Modules that two blocks hold train under fsdp; a state that two stages would change does not under pp."""

from __future__ import annotations

from typing import Any

import pytest

from batch_steps import check_equal
from proof_rows import chosen
from shared_modules_case import NETS
from shoal.trace.find.blocks import fsdp_blocks

UNITS = {
    "two blocks": [],
    "and the root": [],
    "the root and a block": ["blocks.0", "blocks.2"],
    "two of four": ["blocks.0", "blocks.2"],
    "inside": ["blocks.2"],
    "a list": ["blocks.1"],
    "a buffer": ["blocks.0", "blocks.1", "blocks.2"],
}
"""Blocks that fsdp gathers one at a time."""

WORLDS = [(kind, layout, how) for kind in UNITS for layout in ("fsdp", "hsdp")
          for how in ("none", "full")]  # fmt: skip
SHORT = [("two blocks", "fsdp", "full"), ("two of four", "fsdp", "none")]


@pytest.mark.parametrize("kind", UNITS)
def test_a_block_that_shares_a_module_is_no_unit(kind: str) -> None:
    assert list(fsdp_blocks(NETS[kind]())) == UNITS[kind]


@pytest.mark.parametrize(("kind", "layout", "recompute"), chosen(WORLDS, SHORT))
def test_fsdp_trains_it_as_one_process(worlds, kind: str, layout: str, recompute: str) -> None:
    (plain,) = worlds(1).call("shared_modules_case:plain", kind=kind)
    ranks, asked = (2, layout) if layout == "fsdp" else (4, {"dp_replicate": 2, "dp_shard": 2})
    found = worlds(ranks).call(
        "shared_modules_case:trained", kind=kind, layout=asked, recompute=recompute
    )
    for one in found:
        check_equal(one, plain)
    lines = [line for line in found[0]["lines"] if "share weights" in line]
    assert len(lines) == (not UNITS[kind])
    assert not any("no blocks" in line for line in found[0]["lines"])


REFUSED = {
    "siamese BatchNorm": "trunk ran 2 times in a pass, and each call changed the buffer "
    "trunk.1.running_mean",
    "siamese count": "trunk ran 2 times in a pass, and each call changed the buffer trunk.1.calls",
    "shared BatchNorm": "blocks.0 and blocks.1 ran 2 times in a pass, and each call changed the "
    "buffer blocks.0.shared.running_mean",
}
SAME = ("siamese GroupNorm", "siamese cache", "middle BatchNorm", "middle count")


@pytest.mark.parametrize("kind", REFUSED)
def test_pp_refuses_stages_that_change_one_buffer(worlds, kind: str) -> None:
    found: list[dict[str, Any]] = worlds(2).call(
        "shared_modules_case:trained", kind=kind, layout="pp", prove="off"
    )
    for one in found:
        assert one["error"] == (
            f"layout.pp = 2: {REFUSED[kind]}; these calls must lie on one stage, which leaves 1 "
            f'stage; try: layout={{"pp": 1}}'
        )


@pytest.mark.parametrize("kind", SAME)
def test_pp_keeps_calls_that_change_one_buffer_on_one_stage(worlds, kind: str) -> None:
    (plain,) = worlds(1).call("shared_modules_case:plain", kind=kind)
    for one in worlds(2).call("shared_modules_case:trained", kind=kind, layout="pp", prove="off"):
        check_equal(one, plain)
