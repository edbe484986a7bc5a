"""Ends of a loop of the user's own that no error explains: Ctrl-C, and steps that were all skipped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forks import Forks

DEADLINE_S = 150  # only a hang reaches it
INTERRUPTED = """\
import os, signal, sys, torch, shoal

folder = None if sys.argv[1] == "no folder" else "run"
run = shoal.parallelize(
    torch.nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1),
    lambda outputs, targets: (outputs - targets) ** 2, folder=folder,
)
for _ in range(5):
    run.step((torch.ones(4, 4), torch.ones(4, 2)))
    if run.step_count == 3 and sys.argv[1] == "saved":
        run.save()
os.kill(os.getpid(), signal.SIGINT)
run.step((torch.ones(4, 4), torch.ones(4, 2)))
"""
ENDS = {
    "saved": "shoal: Ctrl-C at step 5: the newest checkpoint in run is of step 3; steps 4 – 5 are "
    "lost; start the script again, and run.restore() goes on from there",
    "unsaved": "shoal: Ctrl-C at step 5: nothing was saved: no run.save() was reached, so the script "
    "begins at its first step again; try: run.save() more often, with run.restore() before the loop",
    "no folder": "shoal: Ctrl-C at step 5: nothing was saved: the run has no folder; try: "
    'shoal.parallelize(…, folder="runs/x"), with run.restore() and run.save()',
}


@pytest.mark.parametrize("how", ENDS)
def test_ctrl_c_says_what_is_saved(tmp_path: Path, programs: Forks, how: str) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    done = programs.run("train.py", how, cwd=tmp_path, timeout=DEADLINE_S)
    assert done.returncode in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in done.stderr, "nothing is hidden"
    assert done.stderr.splitlines()[-1] == ENDS[how]


SKIPPED = """\
import sys, torch, shoal

how = sys.argv[1]
run = shoal.parallelize(
    torch.nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1),
    lambda outputs, targets: (outputs - targets) ** 2, skip_limit=9, folder="run",
)
for number in range(4):
    value = 1.0 if how == "one counts" and number == 2 else float("nan")
    run.step((torch.full((4, 4), value), torch.ones(4, 2)))
if how != "unclosed":
    run.close()
    print("published")
"""


@pytest.mark.parametrize("how", ["closed", "unclosed", "one counts"])
def test_a_run_that_moved_no_weight_says_so(tmp_path: Path, programs: Forks, how: str) -> None:
    """Status 3, as of `shoal train`: `python train.py && publish` publishes no untrained model."""
    (tmp_path / "train.py").write_text(SKIPPED)
    done = programs.run("train.py", how, cwd=tmp_path, timeout=DEADLINE_S)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == (3 if how == "closed" else 0), done.stderr
    assert ("published" in done.stdout) == (how == "one counts")
    if how == "closed":
        assert last.startswith("shoal: train.py:12: steps 1 – 4: all were skipped: non-finite")
        assert last.endswith(
            "no weight moved; look at these samples, lower the optimizer's lr, or set clip"
        )
        assert not (tmp_path / "run" / "owner.json").exists(), "it is closed all the same"
    elif how == "unclosed":
        assert last == "shoal: 4 of 4 steps skipped: no weight moved"
    else:
        assert last == "shoal: 3 of 4 steps skipped"
