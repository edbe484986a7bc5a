"""`shoal train --dry-run` checks everything, says what is foreseen, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.errors import ConfigError
from shoal.cli.main import app
from shoal.cli.train import resume_outline


def test_islands_are_foreseen_on_several_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["islands.method=diloco", "islands.count=3", "islands.period=40"]
    done = CliRunner().invoke(app, ["train", "--dry-run", *said])
    assert done.exit_code == 0, done.output
    assert "layout: single on 1 process in each of 3 islands; 16 samples" in done.output
    assert "islands: diloco, a merge every 40 steps" in done.output
    shares = [
        float(line.split()[2].rstrip("%"))
        for line in done.output.splitlines()
        if "Mbit/s  " in line
    ]
    assert shares == sorted(shares)
    assert len(shares) == 4
    assert done.output.endswith("nothing was started\n")
    assert not list(tmp_path.iterdir())


def test_islands_with_one_checkpoint_are_refused_before_the_start() -> None:
    said = ["islands.method=diloco", "islands.count=2", "checkpoint.keep=1"]
    done = CliRunner().invoke(app, ["train", "--dry-run", *said])
    assert "checkpoint.keep = 1: " in str(done.exception)
    assert "try: checkpoint.keep=2" in str(done.exception)


def test_what_is_wrong_is_said_as_in_a_real_start() -> None:
    done = CliRunner().invoke(app, ["train", "--dry-run", "islands.count=3"])
    assert isinstance(done.exception, ConfigError)
    assert "try: islands.method=diloco" in str(done.exception)


@pytest.mark.parametrize(
    ("saved", "steps", "told"),
    [
        ({"": [50, 850]}, 20_000, "from step 850; 19,150 steps are left"),
        ({"": [7]}, 0, "from step 7"),
        ({"island-0": [5, 10], "island-1": [5]}, 20, "from step 5; 15 steps are left"),
        ({}, 20, "from the beginning, since no complete checkpoint is there"),
    ],
    ids=["a run", "epochs", "islands", "nothing"],
)
def test_a_resume_says_from_where_it_would_go_on(
    tmp_path: Path, saved: dict[str, list[int]], steps: int, told: str
) -> None:
    for name, numbers in saved.items():
        for number in numbers:
            folder = tmp_path / name / "checkpoints" / f"step-{number}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").touch()
    assert resume_outline(tmp_path, steps) == f"goes on: {told}"
