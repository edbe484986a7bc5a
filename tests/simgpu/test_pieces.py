"""The page of pitfalls on a simulated device: memory in pieces is caused, detected and mended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cli"))

from test_pitfalls_page import told  # noqa: E402


@pytest.mark.proof
def test_memory_in_pieces(tmp_path: Path, environ: Mapping[str, str]) -> None:
    pieces, whole = told("Memory fragmentation", "pieces.py", tmp_path, environ=environ)
    assert "note: the device's memory is in pieces: " in pieces
    assert "next: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True shoal train --resume" in pieces
    assert "in pieces" not in whole
    assert "nothing wrong" in whole
