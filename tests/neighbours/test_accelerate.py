"""A script of Accelerate's after one inserted line, beside what Accelerate itself found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proof_rows import chosen

HERE = Path(__file__).parent
THEIRS = json.loads((HERE / "accelerate_found.json").read_text())["found"]
LINE = "import shoal.neighbours.accelerate\n"
RELATIVE = 1e-6
"""float32; 52 steps with AdamW and dropout."""


@pytest.mark.parametrize(
    "case",
    chosen([(case,) for case in THEIRS], [("1 1",), ("2 4",), ("2 4 split",)]),
)
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


AFTER = """
import json
import torch
from accelerate import Accelerator

accelerator = Accelerator(log_with="all", project_dir="logs", kwargs_handlers=["one"])
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
accelerator.init_trackers("mine")
for step in range(2):
    accelerator.backward(model(torch.ones(4, 2)).mean())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    accelerator.log({"lr": schedule.get_last_lr()[0]}, step=step)
accelerator.print("done", 1, sep="-", end="!")
accelerator.end_training()
"""


def test_a_schedule_made_after_prepare_and_what_is_logged(programs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LINE + AFTER)
    ended = programs.run("train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    logged = [json.loads(line) for line in (tmp_path / "logs" / "log.jsonl").open()]
    assert logged == [{"step": 0, "lr": 0.5}, {"step": 1, "lr": 0.25}]
    assert ended.stdout == "done-1!"
    assert "kwargs_handlers: what it sets is not read" in ended.stderr
    assert "values of log go to logs/log.jsonl" in ended.stderr


def test_what_scripts_ask_beyond_the_printed_calls(programs: Any, tmp_path: Path) -> None:
    """Local SGD, nested loaders, sums and pads over processes, names of states; on two."""
    ended = programs.world(2, str(HERE / "accelerate_case.py"), cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
