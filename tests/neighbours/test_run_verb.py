"""`shoal run --as …`: the inserted line as a command, and what is wrong with its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def test_it_inserts_the_line(programs: Any, tmp_path: Path) -> None:
    printed = (HERE / "printed_deepspeed.py").read_text()
    (tmp_path / "train.py").write_text(printed.replace("import shoal.neighbours.deepspeed\n", ""))
    words = ("-m", "shoal", "run", "--as", "deepspeed", "--", "train.py", "found.json")
    ended = programs.run(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "found.json").read_text())["steps"] == 10


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--as", "deepsped", "--", "mine.py"), "try: deepspeed"),
        (
            ("--as", "lightning", "--", "mine.py"),
            'try: Trainer(strategy="shoal"), after import',
        ),
        (
            ("--as", "deepspeed", "--", "mein.py"),
            "mein.py: there is no such script; try: mine.py",
        ),
        (
            ("--as", "deepspeed", "--", "mine.py"),
            "PipelineModule is not answered by Shoal; try:",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    programs: Any, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    (tmp_path / "mine.py").write_text("import deepspeed\ndeepspeed.PipelineModule(layers=[])\n")
    ended = programs.run("-m", "shoal", "run", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_the_trainer_of_transformers_is_told_where_to_go(programs: Any, tmp_path: Path) -> None:
    """What it begins with, under Accelerate's name."""
    text = "from accelerate.state import AcceleratorState as S\nS._reset_state(reset_partial_state=True)\n"
    (tmp_path / "mine.py").write_text(text)
    ended = programs.run("-m", "shoal", "run", "--as", "accelerate", "--", "mine.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "transformers.Trainer steps through Accelerate's inside" in ended.stderr
    assert "try: a loop of your own with accelerator.prepare" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_a_scripts_own_error_is_shown_whole(programs: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import deepspeed\nopen('nowhere')\n")
    ended = programs.run("-m", "shoal", "run", "--as", "deepspeed", "--", "mine.py", cwd=tmp_path)
    assert ended.returncode == 1
    assert "mine.py" in ended.stderr
    assert "FileNotFoundError" in ended.stderr
