"""What the plan foresees of a device's memory beside what its allocator held: within 8 %."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import started

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


def test_a_device_holds_what_was_foreseen(forks: Any, tmp_path: Path) -> None:
    words = (str(ROWS), "--worker", str(tmp_path / "rows.json"), "--rows", ",".join(SHORT))
    ranks = started(words[0], 2, words[1:], {}, forks.start)
    told = [rank.communicate(240.0) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(SHORT)
    for row in rows:
        held, foreseen = (
            max(max(rank.get(name, math.inf) for name in names) for rank in row["ranks"])
            for names in (("held",), ("foreseen_step", "foreseen_start"))
        )
        row["off"] = foreseen / held - 1
    held_to_the_gate(rows)


def test_a_pipeline_without_memory_says_so_and_ends(forks: Any, tmp_path: Path) -> None:
    """Not so by nature: an allocator that finds none waits for its device, so for what is posted."""
    words = (str(ROWS), "--limited", "gpt", "pp", "peak", str(tmp_path / "o"))
    until_s = time.monotonic() + 100
    ranks = started(words[0], 2, words[1:], {}, forks.start)
    try:
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < until_s:
            time.sleep(0.05)
        (first,) = [rank for rank in ranks if rank.poll() is not None][:1]
        _, said = first.communicate()
    finally:
        for rank in ranks:
            rank.kill()
    assert first.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory" in said


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
