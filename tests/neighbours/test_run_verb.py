"""`shoal run --as …`: the inserted line as a command, and what is wrong with its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.view.diagnose import diagnose

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


RAISES = """\
import torch
from accelerate import Accelerator

model = torch.nn.Linear(4, 2)
rows = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
door = Accelerator()
model, optimizer, loader = door.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, 4)
)
for inputs, targets in loader:
    loss = ((model(inputs) - targets) ** 2).mean()
    door.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
raise ValueError("their own")
"""


def test_a_scripts_own_error_is_kept_in_its_run_folder(programs: Any, tmp_path: Path) -> None:
    """As `python SCRIPT` keeps it: `shoal diagnose` shows it."""
    (tmp_path / "mine.py").write_text(RAISES)
    words = ("run", "--as", "accelerate", "--folder", "runs/a", "--", "mine.py")
    ended = programs.run("-m", "shoal", *words, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith('raised in mine.py:15: raise ValueError("their own")\n')
    (found,) = diagnose(tmp_path / "runs" / "a")
    assert found.what.endswith("exit code 1: mine.py:15: ValueError: their own")
