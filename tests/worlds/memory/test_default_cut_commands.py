"""The default micro-batch by whole commands, from one process to four and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_run import trajectory
from counting_run import COUNTING, leg


@pytest.mark.proof("share")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_no_sample_is_lost_or_doubled(tmp_path: Path, strategy: str) -> None:
    """Two epochs of 120 samples in steps of 24, and other ranks after every second step."""
    (tmp_path / "counting.py").write_text(COUNTING)
    samples: list[int] = []
    sizes = [24, 12, 8, 6, 6]
    for number, processes in enumerate((1, 2, 3, 4, 1)):
        layout = f"layout.strategy={strategy if processes > 1 else 'single'}"
        passes, output = leg(tmp_path, processes, 2 * number + 2, layout)
        assert {len(ids) for ids in passes} == {sizes[number]}
        changed = sizes[number] != sizes[max(number - 1, 0)]
        assert ("masks of dropout and statistics of BatchNorm" in output) == changed, output
        samples += [one for ids in passes for one in ids]
    assert [row[0] for row in trajectory(tmp_path / "runs" / "run")] == list(range(1, 11))
    for epoch in (samples[:120], samples[120:]):
        assert sorted(epoch) == list(range(120))
