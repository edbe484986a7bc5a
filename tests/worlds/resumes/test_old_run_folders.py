"""Run folders that 3070ad02 wrote: resumed they go on with the losses of an unbroken run.

`tests/fixtures/write_run_folders.py` made them and says how.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import old_runs_case
from shoal.cli import islands as cli_islands
from shoal.cli import start
from shoal.cli.main import app
from shoal.fabric import start_world

FOLDERS = old_runs_case.FIXTURES / "run_folders"
EXPECTED = json.loads((FOLDERS / "expected.json").read_text())
BOUND = 1e-6
"""Of a loss of 3.4; in float64 they differ by rounding alone, two runs are in float32."""

SHORT = ("single", "fsdp", "tp", "pp", "ddp-int8", "islands", "own-loop")
"""Rows of `make test`: one of each way in which states are cut; the others differ in less (ddp: ddp-int8)."""

NAMES = [
    pytest.param(n, marks=[] if n in SHORT else [pytest.mark.proof("faults")]) for n in EXPECTED
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder as the runs were started in."""
    shutil.copytree(FOLDERS / "tokens", tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copied(here: Path, name: str) -> Path:
    """The run folder of a fixture, by its path from the working folder."""
    shutil.copytree(FOLDERS / "runs" / name, here / "runs" / name)
    return Path("runs", name)


def prepared(folder: Path) -> Any:
    """What `shoal train --resume` settles and writes before it starts workers."""
    found = start.prepare_run([], folder)
    start.write_run_folder(found)
    return found


def assert_unbroken(folder: Path, expected: dict[str, dict[str, list[float]]]) -> None:
    for part, values in expected.items():
        lines = (folder / part / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["step"] > 2]
        assert [row["step"] for row in rows] == [3, 4]
        for key, wanted in values.items():
            assert [row[key] for row in rows] == pytest.approx(wanted, rel=0, abs=BOUND), (
                part,
                key,
            )


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_as_if_it_had_never_stopped(
    here: Path, worlds: Any, islands: Any, name: str
) -> None:
    folder = copied(here, name)
    if name == "own-loop":
        worlds(2).call("old_runs_case:resume_own_loop", cwd=str(here))
    elif name == "islands":
        found = prepared(folder)
        cli_islands._write_folders(found.loaded, found.plan, folder, sized=False)
        asked = {"cwd": str(here), "folder": str(folder)}
        assert islands(2).call("old_runs_case:resume_island", **asked) == [[0], [0]]
    else:
        size = prepared(folder).loaded.config.launch.processes
        if size == 1:
            codes = [old_runs_case.resume(start_world({}), str(here), str(folder))]
        else:
            asked = {"cwd": str(here), "folder": str(folder)}
            codes = worlds(size).call("old_runs_case:resume", **asked)
        assert codes == [0] * size
    assert_unbroken(folder, EXPECTED[name]["runs"])


def test_they_are_read_by_the_commands(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were copied while they ran: abandoned, with a way on; every byte is whole."""
    monkeypatch.setattr(sys, "argv", ["shoal"])
    for name in EXPECTED:
        folder = copied(here, name)
        parts = sorted(folder.glob("island-*")) or [folder]
        for part in parts:
            for verb in ("list", "verify"):
                done = CliRunner().invoke(app, ["checkpoint", verb, str(part)])
                assert done.exit_code == 0, (name, verb, done.output, done.exception)
                assert f"{part}/checkpoints/step-2" in done.output
        done = CliRunner().invoke(app, ["diagnose", str(folder)])
        cut = name != "own-loop"  # a script's loop knows no last step
        assert done.exit_code == int(cut), (name, done.output, done.exception)
        assert ("abandoned at step 2 of 4" in done.output) == cut, done.output
        assert ("next: shoal " in done.output) == cut, done.output


def test_no_path_of_a_machine_is_in_them() -> None:
    """They say where nobody's home is, and stay small."""
    files = [path for path in FOLDERS.rglob("*") if path.is_file()]
    for path in files:
        text = path.read_bytes()
        for word in (b"/tmp/", b"/root", b"/home", b"runs-fixture"):
            assert word not in text, f"{path}: {word!r}"
    assert sum(path.stat().st_size for path in files) < 2**20
    assert {Path(path).name for path in (FOLDERS / "runs").iterdir()} == set(EXPECTED)
