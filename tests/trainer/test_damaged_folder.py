"""Resuming from a run folder that somebody damaged: one line, and the run goes on or refuses."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_small import Rows, linear, run_of

from shoal.base.errors import CheckpointError, ConfigError, ShoalError
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.manifest import _add_digest
from shoal.trainer.state.replaced_folder import save_if_deleted

ROWS = Rows(8)
HEAD = b'{"step":1,"loss":2.0}\n{"step":2,"loss":1.0}\n'
HALF = b'{"step":3,"lo'


def made(folder: Path) -> Any:
    return run_of(linear(), batch=4, micro_batch=4, folder=folder)


@functools.cache
def trained() -> Path:
    """A run folder with a checkpoint of step 2, from which tests copy theirs."""
    folder = Path(tempfile.mkdtemp(prefix="trained-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = made(folder)
    for batch in run.loader(ROWS):
        run.step(batch)
    assert run.step_count == 2
    assert run.save()
    run.close()
    return folder


def saved(folder: Path) -> Path:
    """A run folder with a checkpoint of step 2."""
    shutil.copytree(trained(), folder)
    return folder


def told(run: Any) -> list[str]:
    events = [json.loads(line) for line in run.recorder.events.path.read_text().splitlines()]
    return [e["text"] for e in events if e["event"] == "notice"]


@pytest.mark.parametrize(
    "line",
    [b"\xff", b"null", b"1", b"[]", b'{"loss":1}', b'{"step":"2"}', b'{"step":null}', b"",
     b'{"step":' + b"[" * 100_000],
    ids=lambda line: repr(line[:14]),
)  # fmt: skip
def test_a_damaged_line_of_the_metrics_is_put_aside(tmp_path: Path, line: bytes) -> None:
    folder = saved(tmp_path / "run")
    path = folder / "metrics.jsonl"
    head = path.read_bytes()
    path.write_bytes(line + b"\n" + head + HALF)
    run = made(folder)
    assert run.restore()
    assert path.read_bytes() == head
    assert (folder / "metrics.jsonl.damaged").read_bytes() == line + b"\n"
    assert told(run)[-1] == (
        f"{path}: 1 line that cannot be read, put aside into metrics.jsonl.damaged"
    )
    assert run.step(next(iter(run.loader(ROWS)))).step == 3
    run.close()


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(HALF)
    run = made(folder)
    assert run.restore()
    assert not (folder / "metrics.jsonl.damaged").exists()
    assert told(run) == []
    run.close()


def forge(folder: Path, change: Any) -> None:
    """Change the record of the checkpoint of step 2, and seal it as Shoal does."""
    path = folder / "checkpoints" / "step-2" / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("digest")
    change(content["record"])
    path.write_bytes(_add_digest(content))


FORGED: dict[str, tuple[Any, str]] = {
    "step": (lambda r: r.update(step="2"), "Expected `int`, got `str` - at `record.step`"),
    "other-step": (lambda r: r.update(step=3), "is of step 2, its record of step 3"),
    "no-data": (lambda r: r.pop("data"), "Object missing required field `data`"),
    "data": (lambda r: r.update(data=7), "Expected `array`, got `int` - at `record.data`"),
    "position": (lambda r: r.update(data=[{"position": -1}]), "at `record.data[0].position`"),
    "no-position": (lambda r: r.update(data=[{"samples": 8}]), "`record.data` without position"),
    "optimizer": (lambda r: r.update(optimizer=None), "at `record.optimizer`"),
    "class": (lambda r: r["optimizer"].pop("class"), "required field `class`"),
    "scalars": (lambda r: r["optimizer"].update(scalars=[]), "at `record.optimizer.scalars`"),
    "groups": (lambda r: r["optimizer"].update(groups=[{}]), "at `record.optimizer.groups[0]`"),
    "scale": (lambda r: r.update(loss_scale="x"), "at `record.loss_scale`"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_one_line_that_names_the_field(tmp_path: Path, name: str) -> None:
    change, text = FORGED[name]
    forge(saved(tmp_path / "run"), change)
    run = made(tmp_path / "run")
    with pytest.raises(CheckpointError) as caught:
        run.restore()
    assert text in str(caught.value)
    assert "checkpoints/step-2/manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    run.close()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_forged_records_never_end_in_a_traceback(tmp_path: Path, seed: int) -> None:
    folder, luck = saved(tmp_path / "run"), random.Random(seed)
    path = folder / "checkpoints" / "step-2" / "manifest.json"
    sealed = path.read_bytes()
    odd = [None, 0, -1, "x", [], {}, 1e300, True, [[]], {"a": 1}, 10**30]
    for _ in range(20):
        path.write_bytes(sealed)

        def change(record: Any) -> None:
            holder, key = record, luck.choice(["step", "data", "optimizer", "seed", "batch"])
            while isinstance(holder[key], (dict, list)) and holder[key] and luck.random() < 0.7:
                holder = holder[key]
                keys = list(holder) if isinstance(holder, dict) else range(len(holder))
                key = luck.choice(list(keys))
            if isinstance(holder, dict) and luck.random() < 0.3:
                del holder[key]
            else:
                holder[key] = luck.choice(odd)

        forge(folder, change)
        run = made(folder)
        refused = ""
        try:
            if run.restore():
                run.step(next(iter(run.loader(ROWS))))
        except ShoalError as failure:
            refused = str(failure)
        assert "\n" not in refused
        run.close()


def test_a_folder_that_is_deleted_in_mid_run_is_made_anew(tmp_path: Path) -> None:
    """The run ended with status 0, and its resume was refused for a missing run.toml."""
    folder = saved(tmp_path / "parent" / "run")
    (folder / "run.toml").write_text("[train]\n")
    run = made(folder)
    assert run.restore()
    run.step((torch.ones(4, 4), torch.ones(4, 2)))
    shutil.rmtree(tmp_path / "parent")
    run.step((torch.ones(4, 4), torch.ones(4, 2)))
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == [4]
    assert (folder / "run.toml").read_text() == "[train]\n"
    assert told(run) == [
        f"{folder}: the run folder was deleted while the run trains, and is made anew: earlier rows "
        f"and checkpoints are gone, the next checkpoint holds all that a resume needs; try: a "
        f"run.folder that nothing cleans up"
    ]
    shutil.rmtree(folder)
    assert run.save()
    run.close()
    again = made(folder)
    assert again.restore()
    assert again.step_count == 4
    again.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def a_step(run: Any) -> Any:
    return run.step((torch.ones(4, 4), torch.ones(4, 2)))


@pytest.mark.parametrize(
    ("way", "call"),
    [("moved", "step"), ("removed", "save"),
     pytest.param("moved", "save", marks=pytest.mark.proof("faults")),
     pytest.param("removed", "step", marks=pytest.mark.proof("faults")),
     pytest.param("taken", "step", marks=pytest.mark.proof("faults"))],
)  # fmt: skip
def test_another_folder_in_the_place_of_the_runs_stays_as_it_is(
    tmp_path: Path, way: str, call: str
) -> None:
    """Rows of two runs were mixed, and the other run's old checkpoints were removed."""
    folder, other = tmp_path / "run", tmp_path / "other"
    run = made(folder)
    (folder / "run.toml").write_text("[train]\n")
    a_step(run)
    saved(other)
    if way == "moved":
        folder.rename(tmp_path / "moved")
    else:
        shutil.rmtree(folder)
    if way == "taken":  # made anew by this run, and then another one begins there
        a_step(run)
        lease = RunLease(folder, "another")
        lease.acquire()
        shutil.copytree(other, folder, dirs_exist_ok=True)
    else:
        other.rename(folder)
    before = contents(folder)
    made_steps = run.step_count
    if call == "step":
        a_step(run)
    with pytest.raises(ConfigError) as caught:
        a_step(run) if call == "step" else run.save()
    own = tmp_path / ("moved" if way == "moved" else "run-2")
    last = made_steps + (call == "step")
    assert str(caught.value) == (
        f"{folder}: another folder lies there since step {last}, and this run wrote nothing into "
        f'it; its own is {own}, with the weights of step {last}; try: folder="{own}" and '
        f"run.restore()"
    )
    assert contents(folder) == before
    run.close()
    assert contents(folder) == before
    assert not (own / "owner.json").exists()
    assert (own / "run.toml").read_text() == "[train]\n"
    again = made(own)
    assert again.restore()
    assert again.step_count == last
    again.close()


def test_a_folder_that_is_moved_with_nothing_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = made(folder)
    a_step(run)
    folder.rename(tmp_path / "elsewhere")
    a_step(run)
    (line,) = told(run)
    assert line.startswith(f"{folder}: the run folder was moved while the run trains, and is made")
    assert f"earlier rows and checkpoints are in {tmp_path / 'elsewhere'}, the next" in line
    run.close()


def test_a_folder_that_is_copied_and_put_back_is_the_runs_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = made(folder)
    a_step(run)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    a_step(run)
    (folder / "owner.json").unlink()
    a_step(run)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == [1, 2, 3]
    assert not (folder / "events.jsonl").exists()
    run.close()


HOOK = """
import shutil

GONE = []

def clean(record):
    found = [record["event"], record.get("step")] == {at!r}
    if found and (record["event"] == "step" or not GONE):
        GONE.append(found)
        shutil.rmtree({folder!r}, ignore_errors=True)
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "at",
    [("step", 3), ("step", 6), ("checkpoint_saved", 6), ("validated", 6)],
    ids=["a step", "the last step", "the last save", "the last validation"],
)
def test_a_command_whose_folder_is_deleted_can_be_resumed(
    tmp_path: Path, programs: Any, processes: int, at: tuple[str, int]
) -> None:
    (tmp_path / "cleaner.py").write_text(HOOK.format(at=list(at), folder="runs/one"))
    small = [
        "model.name=mlp", "data.source=digits", "train.batch=8", "train.micro_batch=4",
        f"launch.processes={processes}", "run.folder=runs", "run.name=one",
    ]  # fmt: skip
    hook = "train.on=cleaner:clean"
    done = programs.run("-m", "shoal", "train", *small, "train.steps=6", hook, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "was deleted while the run trains" in done.stdout + done.stderr
    assert "run folder: runs/one\n" in done.stdout
    again = ("-m", "shoal", "train", "--resume", "runs/one", "train.steps=8", 'train.on=""')
    done = programs.run(*again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-2:] == [7, 8]


def test_a_checkpoint_that_is_deleted_before_the_end_is_saved_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = made(folder)
    (folder / "run.toml").write_text("[train]\n")
    a_step(run)
    saved = run.save()
    assert save_if_deleted(run, saved) == saved
    shutil.rmtree(folder)
    again = save_if_deleted(run, saved)
    assert again == saved
    assert (saved / "manifest.json").exists()
    assert (folder / "run.toml").read_text() == "[train]\n"
    shutil.rmtree(saved)
    assert save_if_deleted(run, saved) == saved
    assert (saved / "manifest.json").exists()
    run.close()


PUT = """
from pathlib import Path

def put(record):
    if record["event"] == "step" and record["step"] == {step} and record["rank"] == 0:
        Path("runs/one").rename({moved!r})
        Path("runs/other").rename("runs/one")
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("moved", ["runs/moved", "elsewhere"])
@pytest.mark.parametrize("step", [3, 6], ids=["a step", "the last step"])
def test_a_command_leaves_another_folder_as_it_is(
    tmp_path: Path, programs: Any, processes: int, moved: str, step: int
) -> None:
    (tmp_path / "mover.py").write_text(PUT.format(step=step, moved=moved))
    small = [
        "model.name=mlp", "data.source=digits", "train.batch=8", "train.micro_batch=4",
        f"launch.processes={processes}", "run.folder=runs",
    ]  # fmt: skip
    train = ("-m", "shoal", "train", *small, "checkpoint.keep=1")
    done = programs.run(*train, "run.name=other", "train.steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = contents(tmp_path / "runs" / "other")
    mine = ("run.name=one", "train.steps=6", "train.on=mover:put", "launch.restarts=2")
    done = programs.run(*train, *mine, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    own = "runs/moved" if moved == "runs/moved" else "runs/one-2"
    lines = [one for one in done.stderr.splitlines() if "another folder lies there" in one]
    assert len(lines) == 1, done.stderr
    assert f"its own is {own}, with the weights of step {step}" in lines[0], lines
    assert contents(tmp_path / "runs" / "one") == before
    again = ("-m", "shoal", "train", "--resume", own, "train.steps=8", 'train.on=""')
    done = programs.run(*again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / own / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-2:] == [7, 8]
    assert contents(tmp_path / "runs" / "one") == before
