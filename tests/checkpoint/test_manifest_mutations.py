"""Sixty mutations of a manifest, of which `make proof` does a thousand: no traceback, the file named."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "proof"))

from manifest_mutations import trials


def test_no_mutation_ends_in_a_traceback(tmp_path: Path) -> None:
    found = trials(60, 1, tmp_path / "run")
    assert not found["wrong"], found["wrong"][:3]
    counts = found["counts"]
    assert counts["bytes: restore: refused"] == counts["bytes: verify: refused"] == 30
    # How many depends on the manifest: modules of this session's tests stand in it as the user's code,
    # and what differs of code is told and no reason to refuse.
    assert counts["sealed: restore: refused"] >= 5
