"""An uncaught ShoalError in a user's own script: one line, the user's place, the right status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forks import Forks
from shoal.base.errors import ConfigError, TrainingError
from shoal.base.text.user_frames import user_line
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer.process.crash_report import format_error_line
from shoal.trainer.process.excepthook import install_excepthook
from shoal.view.diagnose import diagnose

SCRIPT = """\
import atexit, sys
import torch
from torch import nn
import shoal

atexit.register(print, "atexit ran")
how, place = sys.argv[1:]
torch.manual_seed(0)
model = nn.Linear(4, 2)
def loss(outputs, targets):
    values = (outputs - targets) ** 2
    if how == "value" and run.world.rank == int(place):
        raise ValueError("their own")
    return values.mean() if how == "mean" and run.world.rank in (int(place), -1) else values
run = shoal.parallelize(model, lambda p: torch.optim.SGD(p, lr=0.1), loss, skip_limit=1)
batch = (torch.full((4, 4), 1.0 + run.world.rank), torch.ones(4, 2))
if how == "nan":
    batch = (torch.full((4, 4), float("nan")), torch.full((4, 2), 1.0 + run.world.rank))
def train():
    for _ in range(3):
        run.step(batch)
train()
run.close()
print("reached the end")
"""
LIGHT = """\
import sys
from shoal.base.errors import PlanError, TrainingError
from shoal.trainer.process.excepthook import install_excepthook

install_excepthook()
errors = {"plan": PlanError("layout: no"), "training": TrainingError("step 1: bad")}
errors |= {"value": ValueError("two\\nlines"), "interrupt": KeyboardInterrupt()}
raise errors[sys.argv[1]]
"""
STEP_LINE = next(
    number for number, line in enumerate(SCRIPT.splitlines(), 1) if "run.step(batch)" in line
)
DEADLINE_S = 150  # only a hang reaches it: on a busy machine five starts took over 60


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_mean_in_one_process(script: Path, programs: Forks) -> None:
    done = programs.run("train.py", "mean", "0", cwd=script, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr.split("\n", 2)[2] == (  # behind the greeting
        f"shoal: train.py:{STEP_LINE}: loss returned a mean: ranks with unequal token counts would "
        f"weigh wrongly. Return (sum, count), or wrap it: shoal.mean_of_samples(loss)\n"
    )
    assert done.stdout == "atexit ran\n"


def test_every_kind_of_error(tmp_path: Path, programs: Forks) -> None:
    """Statuses and texts. The first as a program: the status of a hook that raises is Python's doing."""
    (tmp_path / "train.py").write_text(LIGHT)

    def ended(kind: str, **environ: str) -> tuple[int, str, str]:
        words = ("train.py", kind)
        done = programs.run(*words, cwd=tmp_path, environ=environ, timeout=DEADLINE_S)
        return done.returncode, done.stdout, done.stderr

    done = subprocess.run(
        [sys.executable, "train.py", "plan"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    line = "shoal: train.py:8: layout: no\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert ended("training") == (3, "", "shoal: train.py:8: step 1: bad\n")
    code, _, err = ended("value")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("ValueError: two\nlines\n")
    code, _, err = ended("interrupt")
    assert code in (130, -2), "the status that shells know as an interrupt"
    assert err.endswith("KeyboardInterrupt\n")
    code, _, err = ended("plan", SHOAL_TRACEBACK="1")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("shoal.base.errors.PlanError: layout: no\n")


IN_A_FOLDER = """\
import sys, torch, shoal

def loss(outputs, targets):
    if run.step_count == 2 and sys.argv[1] == "value":
        raise ValueError("their own")
    return (outputs - targets) ** 2

run = shoal.parallelize(
    torch.nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), loss, folder="run",
)
for _ in range(4):
    run.step((torch.ones(4, 4), torch.ones(4, 2)))
"""


@pytest.mark.parametrize("how", ["value", "forgets to close"])
def test_a_run_folder_keeps_what_ended_the_loop(tmp_path: Path, programs: Forks, how: str) -> None:
    """`shoal diagnose` finds it there; that nobody called `run.close` is no death."""
    (tmp_path / "train.py").write_text(IN_A_FOLDER)
    done = programs.run("train.py", how, cwd=tmp_path, timeout=DEADLINE_S)
    assert done.returncode == (how == "value"), done.stderr
    found = diagnose(tmp_path / "run")
    assert not (tmp_path / "run" / "owner.json").exists()
    assert [(one.kind, one.rank) for one in found] == [("worker_died", 0)] * (how == "value")
    for one in found:
        assert one.what.endswith("exit code 1: train.py:5, in loss: ValueError: their own")
        assert one.why.startswith("an exception that nobody caught")
        code = 'raise ValueError("their own") (called from train.py:12)'
        assert done.stderr.endswith(f"their own\nraised in train.py:5, in loss: {code}\n")


REFUSED = """\
import sys, torch, shoal

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
how = sys.argv[1]
if how == "swapped":
    shoal.parallelize(optimizer, model, folder="runs/a")
if how == "moved":
    shoal.parallelize(model, torch.nn.MSELoss(reduction="none"), optimizer, folder="runs/a")
if how == "layout":
    shoal.parallelize(model, optimizer, layout={"fdsp": 2}, folder="runs/a")
if how == "batch":
    shoal.parallelize(model, optimizer, batch=7, micro_batch=2, folder="runs/a")
if how == "late":
    torch.nn.Linear.get_extra_state = lambda self: {"seen": 1}
    shoal.parallelize(model, optimizer, folder="runs/a")
if how == "builder":
    shoal.parallelize(lambda: 1 / 0, lambda p: torch.optim.SGD(p, lr=0.1), folder="runs/a")
if how == "kept":
    open("a", "w").write("of the user's")
    shoal.parallelize(model, optimizer, batch=7, micro_batch=2, folder="old")
"""
REFUSALS = {
    "swapped": "shoal.parallelize: model is SGD, optimizer is Linear; try: "
    "shoal.parallelize(model, optimizer, loss), in this order",
    "moved": "shoal.parallelize: model is Linear, optimizer is MSELoss, loss is SGD; try: "
    "shoal.parallelize(model, optimizer, loss), in this order",
    "layout": 'layout.fdsp = 2: no key of a layout; try: layout={"dp_shard": 2}, or layout="fsdp"',
    "batch": "batch = 7: ",
    "late": "model: ",
    "builder": "model: the builder raised ZeroDivisionError",
    "kept": "batch = 7: ",
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_refused_start_is_one_line_and_leaves_no_folder(
    tmp_path: Path, programs: Forks, how: str
) -> None:
    """The line names arguments; a folder that was there before stays, with what is in it."""
    (tmp_path / "train.py").write_text(REFUSED)
    (tmp_path / "old").mkdir()
    done = programs.run("train.py", how, cwd=tmp_path, timeout=DEADLINE_S)
    assert done.returncode == 2, done.stderr
    place, _, line = done.stderr.splitlines()[-1].removeprefix("shoal: ").partition(": ")
    assert place.startswith("train.py:")
    assert line.startswith(REFUSALS[how])
    assert "train.batch" not in line
    assert "layout." not in line.partition("try: ")[2]
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "old").is_dir()


Two = Callable[[str, int], list[tuple[int, str, str]]]


@pytest.fixture
def world_of_two(script: Path, programs: Forks) -> Two:
    """Status, output and errors of two ranks; rank 0 holds the store."""

    def run(how: str, place: int) -> list[tuple[int, str, str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        words = ("train.py", how, str(place))
        started = [
            programs.start(
                words, {**meets, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}, script
            )
            for rank in "01"
        ]
        told = [one.communicate(DEADLINE_S) for one in started]
        greeting, said, own = told[0][1].split("\n", 2)
        assert "ddp (dp_replicate = 2) on 2 processes" in greeting
        assert said.startswith("shoal: auto: "), "rank 0 says what was taken"
        return [
            (started[0].returncode, told[0][0], own),
            (started[1].returncode, *told[1]),
        ]

    return run


@pytest.mark.parametrize("place", [-1, 1])
def test_two_processes(world_of_two: Two, place: int) -> None:
    """What all ranks raise is printed once; a peer that waits for one that raises does not hang."""
    first, second = world_of_two("mean" if place == 1 else "nan", place)
    if place == -1:
        assert [code for code, *_ in (first, second)] == [3, 3]
        told = first[2].splitlines()[-1]
        assert told.startswith(f"shoal: train.py:{STEP_LINE}: step 1: non-finite")
        assert told.endswith(" (on all 2 ranks)")
        assert second[2] == "[rank 1] shoal: exit status 3, as rank 0 prints\n"
        return
    code, out, err = second
    assert code == 2
    assert err.startswith(f"[rank 1] shoal: train.py:{STEP_LINE}: loss returned a mean")
    assert err.count("\n") == 1
    code, out, err = first
    assert code == 1, "the peer's death must not look like success"
    assert err.startswith(f"[rank 0] shoal: train.py:{STEP_LINE}: another rank ended (Connection")
    assert err.count("\n") == 1
    assert "reached the end" not in out


def test_an_error_of_another_kind_ends_a_rank_too(world_of_two: Two) -> None:
    """By its traceback and what is registered at exit, without the teardown: peers wait for it."""
    _, (code, out, err) = world_of_two("value", 1)
    assert code == 1
    assert "ValueError: their own" in err
    assert out == "atexit ran\n"


def test_another_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(kind, error, trace):
        """IPython's, or a debugger's."""

    monkeypatch.setattr(sys, "excepthook", theirs)
    install_excepthook()
    assert sys.excepthook is theirs
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hook = install_excepthook()
    assert sys.excepthook is hook
    assert install_excepthook() is hook

    def torchs(*what):
        """torch.distributed wraps the hook that it finds when a process group is made."""

    torchs.__module__ = "torch.distributed.distributed_c10d"
    monkeypatch.setattr(sys, "excepthook", torchs)
    assert install_excepthook() is not hook
    assert sys.excepthook.ordinary is torchs


def test_the_line() -> None:
    assert format_error_line(ConfigError("a: b\nc"), None, None) == "shoal: a: b c"
    world = World(ProcessInfo(rank=3, size=4), torch.device("cpu"), None)
    assert format_error_line(TrainingError("x"), None, world) == "[rank 3] shoal: x"


def test_the_place_is_the_users_innermost() -> None:
    def mine() -> None:
        torch.nn.Linear(2, 2)(torch.ones(3))

    try:
        mine()
    except RuntimeError as failure:
        place = user_line(failure.__traceback__)
    assert place is not None
    assert place.startswith(os.path.relpath(__file__))
    assert user_line(None) is None
