"""A loop of one's own is greeted in two lines; its plan prints in five; its arguments are guided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_small import Rows, linear, run_of

import shoal
from forks import Forks
from shoal.base.errors import ConfigError
from shoal.trainer.argument_checks import ELSEWHERE

LOOP = """
import sys, torch, shoal
model = torch.nn.Linear(4, 3)
folder = sys.argv[1] or None
run = shoal.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), batch=4, folder=folder)
run.step((torch.ones(4, 4), torch.tensor([0, 1, 2, 0])))
print(run.plan)
run.close()
"""


@pytest.mark.parametrize("folder", ["", "runs/x"])
def test_two_lines_and_a_plan_in_five(folder: str, tmp_path: Path, programs: Forks) -> None:
    done = programs.run("-c", LOOP, folder, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert first == (
        f"shoal: {shoal.__version__}, single, 15 parameters in fp32; run.loader gives 1 rank × 1 "
        "micro-batch × 4 samples = 4 samples per step"
    )
    nothing = 'shoal: no folder, so nothing is kept; try: shoal.parallelize(…, folder="runs/x")'
    kept = "shoal: runs/x: run.save() writes here, run.restore() resumes from here"
    assert second == (kept if folder else nothing)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["layout", "batch", "parameters", "policies", "why"]


def test_an_argument_of_other_libraries_names_ours() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for name, meant in ELSEWHERE.items():
        with pytest.raises(ConfigError, match=f"has no argument {name}; ") as told:
            shoal.parallelize(model, optimizer, **{name: 1})
        assert meant in str(told.value)
    for name, meant in (("ema", "average="), ("criterion", "loss"), ("device", "leave it out: ")):
        assert meant in ELSEWHERE[name]


def test_a_resume_says_where_it_goes_on_and_when_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(2):
        run = run_of(linear(), folder=tmp_path, batch=8)
        caplog.clear()
        assert run.restore() == bool(turn)
        told = [one.getMessage() for one in caplog.records]
        assert told == [f"shoal: {tmp_path}: resumed from step 3"] * turn
        caplog.clear()
        for _ in run.epochs(1):
            for batch in run.loader(Rows()):
                run.step(batch)
            run.save()
        left = [one.getMessage() for one in caplog.records if "nothing is left" in one.getMessage()]
        assert left == turn * [
            "shoal: run.epochs(1): 1 of them are trained already, so nothing is left; to train on, "
            "try: run.epochs(2)"
        ]
        run.close()


def test_a_dict_for_a_model_that_takes_a_tensor() -> None:
    run = run_of(linear(), batch=4)
    with pytest.raises(
        ConfigError, match=r"forward\(input\) was given the batch's whole dict"
    ) as told:
        run.step({"image": torch.ones(4, 4), "label": torch.zeros(4).long(), "path": ["x"] * 4})
    assert "(image, label, path), as is the loss; try: a collate function" in str(told.value)
    assert 'a pair (batch["image"], batch["label"])' in str(told.value)
    run.close()
