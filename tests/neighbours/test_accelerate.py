"""A script of Accelerate's after one inserted line, beside what Accelerate itself found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
THEIRS = json.loads((HERE / "accelerate_found.json").read_text())["found"]
LINE = "import shoal.neighbours.accelerate\n"
RELATIVE = 1e-6
"""float32; 52 steps with AdamW and dropout."""


@pytest.mark.parametrize("case", list(THEIRS))
def test_it_finds_what_accelerate_finds(programs: Any, tmp_path: Path, case: str) -> None:
    size, accumulation, *how = case.split()
    (tmp_path / "train.py").write_text(LINE + (HERE / "accelerate_script.py").read_text())
    ended = programs.world(int(size), "train.py", "out.json", accumulation, *how, cwd=tmp_path)
    assert [one.returncode for one in ended] == [0] * int(size), ended[0].stderr
    found = json.loads((tmp_path / "out.json").read_text())
    *ours, (resumed,) = found
    *theirs, _ = THEIRS[case]
    assert resumed == 0.0, "what was saved goes on as it went"
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    if int(size) > 1:  # Accelerate forgets where its sampler's order was
        again = len(ours) // 4
        ours, theirs = ours[:-again], theirs[:-again]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == pytest.approx(other, rel=RELATIVE), number
