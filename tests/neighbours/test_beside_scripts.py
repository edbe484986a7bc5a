"""The record of the neighbours' own scripts (tests/proof/beside_scripts.py), and the page's table of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS: dict[str, dict[str, Any]] = json.loads((ROOT / "proof/results/neighbours.json").read_text())
PAGE = ROOT / "docs" / "reference" / "moving-in.md"
HEAD = "| script | processes | losses compared | largest difference |\n|---|---|---|---|\n"
RELATIVE = {"fp32": 1e-6, "bf16": 2**-8, "bf16, the loss too": 2**-6}
"""By format; in bf16 the two round at other places, and one of them what it found as well."""


@pytest.mark.parametrize("title", list(ROWS))
def test_a_script_finds_the_neighbours_losses(title: str) -> None:
    row = ROWS[title]
    allowed = RELATIVE[row.get("format", "fp32")]
    assert "fails" not in row
    assert not row["changed"]
    assert len(row["sha256"]) == 64
    assert len(row["commit"]) == len(row["blob"]) == 40
    assert row["same_count"]
    assert len(row["steps"]) == row["processes"]
    assert min(row["steps"]) >= 6
    apart = [
        abs(a - b) / abs(a)
        for a, b in zip(row["losses"]["theirs"], row["losses"]["ours"], strict=True)
    ]
    assert max(apart) <= allowed
    assert row["difference"] <= allowed, "on every rank"
    assert row["first"] != row["last"], "it trained"
    assert ("mistake" in row) == (row.get("as_it_is", 0.0) > allowed), (
        "a mistake makes a difference"
    )


@pytest.mark.parametrize("title", list(ROWS))
def test_the_real_package_was_not_loaded_and_nobody_can_tell(title: str) -> None:
    row = ROWS[title]
    assert row["library"] in row["loaded"]["theirs"], "it may have loaded another one, too"
    others = {*row["loaded"]["theirs"]} - {row["library"]}  # transformers loads Accelerate
    assert {*row["loaded"]["ours"]} <= others
    assert row["version"][row["library"]] is not None
    assert row["told_the_same"]


def test_there_are_four_scripts_of_each() -> None:
    for library in ("accelerate", "deepspeed"):
        assert len({r["address"] for r in ROWS.values() if r["library"] == library}) >= 4


def table() -> str:
    """The page's table."""
    lines = [
        f"| [{title}]({row['address'].replace('HEAD', row['commit'][:12])}) | {row['processes']} | "
        f"{sum(row['steps'])} | {row['difference']:.0e}{more(row)} |\n"
        for title, row in ROWS.items()
    ]
    return HEAD + "".join(lines)


def more(row: dict[str, Any]) -> str:
    """What the neighbour's mistake makes of it, where there is one; or the format, if not fp32."""
    if "mistake" not in row:
        return "" if row.get("format", "fp32") == "fp32" else f" in {row['format']}"
    return f" without a mistake of the neighbour's, {row['as_it_is']:.0e} with it: {row['mistake']}"


def test_the_page_shows_them() -> None:
    page = PAGE.read_text()
    if os.environ.get("UPDATE_DOCS"):
        begin = page.index(HEAD)
        end = page.index("\n\n", begin)
        PAGE.write_text(page[:begin] + table().rstrip() + page[end:])
        page = PAGE.read_text()
    assert table() in page
