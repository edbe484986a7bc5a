"""What scripts ask of DeepSpeed's engine: accumulation, schedules, checkpoints, on every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CASE = str(Path(__file__).with_name("engine_case.py"))


@pytest.mark.parametrize("stage", range(4))
def test_the_engine_computes_what_plain_torch_does(
    programs: Any, tmp_path: Path, stage: int
) -> None:
    ended = programs.world(2, CASE, str(stage), cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
