"""What the plan foresees of a device's memory beside what its allocator held: within 8 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROWS = Path(__file__).resolve().parents[2] / "benchmarks" / "planner" / "devices.py"
GATE = 0.08
SHORT = ("deep fsdp", "wide {'tp': 2}", "blocks zero1 optimizer")
"""Gathered blocks; a check in float64 that is the peak; pieces of an offloaded state."""


def measured(environ: dict[str, str], out: Path, *words: str, deadline_s: float) -> list[Any]:
    """Rows of the benchmark, written by its own program."""
    done = subprocess.run(
        [sys.executable, str(ROWS), "--out", str(out), *words],
        env=environ, capture_output=True, text=True, timeout=deadline_s, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())["rows"]


def held_to_the_gate(rows: list[Any]) -> None:
    failed = [rank["why"] for row in rows for rank in row["ranks"] if "why" in rank]
    assert not failed, failed
    off = {f"{r['model']} {r['layout']} {r.get('offload', '')}": r["off"] for r in rows}
    assert not {name: one for name, one in off.items() if abs(one) > GATE}, off
    assert all(16 * rank["parameters"] >= 64 * 2**20 for row in rows for rank in row["ranks"])


def test_a_device_holds_what_was_foreseen(environ: dict[str, str], tmp_path: Path) -> None:
    rows = measured(environ, tmp_path / "o.json", "--rows", ",".join(SHORT), deadline_s=240)
    assert len(rows) == len(SHORT)
    held_to_the_gate(rows)


TOGETHER = """
import sys
sys.path.insert(0, sys.argv[1])
from processes import run_together
run_together(sys.argv[2:], 2, deadline_s=100)
"""


def test_a_pipeline_without_memory_says_so_and_ends(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """Not so by nature: an allocator that finds none waits for its device, so for what is posted."""
    words = [str(ROWS.parents[1]), str(ROWS), "--limited", "gpt", "pp", "peak", str(tmp_path / "o")]
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, *words],
        env=environ, capture_output=True, text=True, timeout=130, check=False,
    )  # fmt: skip
    assert "OutOfMemoryError: CUDA out of memory" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("ended with 1"), done.stderr[-2000:]


@pytest.mark.proof
def test_every_row_is_foreseen(environ: dict[str, str], tmp_path: Path) -> None:
    rows = measured(environ, tmp_path / "o.json", deadline_s=1500)
    assert len(rows) >= 40
    held_to_the_gate(rows)


@pytest.mark.proof
def test_what_fits_lives_and_little_of_what_does_not(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """Devices limited to shares of the foreseen peak; "tight" says that a run may live or die."""
    words = ("--limits", "--rows", "blocks,llama")
    rows = measured(environ, tmp_path / "o.json", *words, deadline_s=2400)
    assert {row["verdict"] for row in rows} == {"fits", "tight", "no"}
    assert not [row for row in rows if row["verdict"] == "fits" and not row["lives"]]
    refused = [row for row in rows if row["verdict"] == "no"]
    assert sum(row["lives"] for row in refused) <= 0.1 * len(refused)
