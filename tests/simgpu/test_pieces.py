"""The page of pitfalls on a simulated device: memory in pieces is caused, detected and mended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cli"))

from test_pitfalls_page import PAGE, ran, section, told  # noqa: E402

from shoal.view.diagnose import ALLOCATOR  # noqa: E402


@pytest.mark.proof
def test_memory_in_pieces(tmp_path: Path, environ: Mapping[str, str]) -> None:
    pieces, whole = told("Memory fragmentation", "pieces.py", tmp_path, environ=environ)
    assert "note: the device's memory is in pieces: " in pieces
    assert f"try in the next run: {ALLOCATOR}" in pieces
    assert "in pieces" not in whole
    assert "no fault" in whole
    # The setting joins no holes between tensors that stay.
    _, commands = section("Memory fragmentation")
    under = dict([ALLOCATOR.split("=", 1)])
    again = commands[0].replace("run.name=pieces", "run.name=under")
    code, output = ran(again, tmp_path, {**environ, **under})
    assert code == 0, output
    code, said = ran("shoal diagnose runs/under", tmp_path)
    assert "note: the device's memory is in pieces: " in said
    assert "joins no holes between them: make them at once" in said
    assert ALLOCATOR not in said


@pytest.mark.proof
def test_memory_in_slivers_ends_a_run_and_the_setting_keeps_it_going(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    program, (cause, detect, shown) = section("Memory in slivers")
    (tmp_path / "slivers.py").write_text(program)
    small = {**environ, "SIM_MEMORY_BYTES": str(292 * 2**20)}
    code, output = ran(cause, tmp_path, small)
    assert code == 2, output
    assert "Tried to allocate 60.00 MiB" in output
    code, said = ran(detect, tmp_path)
    assert code == 1
    assert "why: memory in pieces: more was free than it asked for" in said
    assert f"next: {ALLOCATOR} shoal train " in said
    assert f"\n{ALLOCATOR} shoal train model.build=slivers" in PAGE.read_text()
    under = dict([ALLOCATOR.split("=", 1)])
    code, output = ran(
        cause.replace("run.name=slivers", "run.name=grown"), tmp_path, {**small, **under}
    )
    assert code == 0, output
    code, said = ran(shown, tmp_path)
    assert (code, "no fault" in said) == (0, True)
