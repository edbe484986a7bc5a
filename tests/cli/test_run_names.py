"""A run's bare name, as `shoal runs` lists it, is taken wherever a run folder is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cli.start import no_steps_line
from shoal.view.diagnosis.run_folders import find_named_run


def make_run(folder: Path) -> None:
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    events = ({"event": "run_started", "time_s": 1.0}, {"event": "run_finished", "time_s": 2.0})
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "run.toml").write_text("")
    (folder / "checkpoints" / "step-4" / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["diagnose", "tuesday"], "runs/tuesday: no fault"),
        (["watch", "tuesday"], "tuesday · ended"),
        (["report", "tuesday"], "runs/tuesday/report.html: "),
        (["report", "tuesday", "runs/tuesday", "--json"], '"path": "comparison.html"'),
        (["runs", "tuesday"], "tuesday  ended"),
        (["checkpoint", "list", "tuesday"], "runs/tuesday/checkpoints/step-4  damaged"),
        (["checkpoint", "verify", "tuesday"], "runs/tuesday/checkpoints/step-4"),
        (["sample", "tuesday", "--prompt", "x"], "runs/tuesday: keeps no"),
        (["data", "look", "tuesday", "--step", "9"], "runs/tuesday/metrics.jsonl"),
        (["train", "--resume", "tuesday"], "resuming runs/tuesday"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bare_name_is_the_run_of_that_name(
    words: list[str], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "tuesday")
    (tmp_path / "tuesday.jsonl").write_text("")  # a near name of a file does not win
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    shown = f"{done.output}{done.exception or ''}"
    assert "does not exist" not in shown
    assert output in shown


def test_a_path_that_exists_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "tuesday")
    monkeypatch.chdir(tmp_path)
    assert find_named_run(Path("tuesday")) == Path("runs/tuesday")
    assert find_named_run(Path("monday")) == Path("monday")
    assert find_named_run(Path("../runs/tuesday")) == Path("../runs/tuesday")
    assert find_named_run(tmp_path / "tuesday") == tmp_path / "tuesday"
    (tmp_path / "tuesday").mkdir()
    assert find_named_run(Path("tuesday")) == Path("tuesday")


@pytest.mark.parametrize(
    ("steps", "epochs", "resumed", "expected"),
    [
        (4, 0, True, "0 steps: step 4 is not below train.steps = 4; try: train.steps=8"),
        (3, 0, True, "0 steps: step 4 is not below train.steps = 3; try: train.steps=7"),
        (5, 0, True, ""),
        (3, 0, False, ""),
        (0, 2, True, ""),  # epochs decide
    ],
)
def test_a_resume_without_a_step_left_is_a_line_before_it_starts(
    tmp_path: Path, steps: int, epochs: int, resumed: bool, expected: str
) -> None:
    make_run(tmp_path)
    train = SimpleNamespace(steps=steps, epochs=epochs)
    loaded = SimpleNamespace(config=SimpleNamespace(train=train))
    prepared: Any = SimpleNamespace(loaded=loaded, folder=tmp_path, resumed=resumed)
    assert no_steps_line(prepared) == expected
