"""`shoal prove -- train.py` as its users meet it, and the parts that protect their files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from forks import Forks
from shoal.base.errors import ConfigError
from shoal.cli.prove_script import parse_script_layouts
from shoal.cli.script_copy import CopyBudget, copy_script_folder, copy_tree
from shoal.cli.script_path import find_script
from shoal.cli.script_proof_lines import report_lines
from shoal.proof.script.script_end import UnrecordableError
from shoal.proof.script.value_files import digest_value, read_values, write_values
from shoal.proof.script.write_guard import WriteGuard, WriteRefusedError, guard_writes

SCRIPT = """
import sys, torch, shoal
from parts import net, squares

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
rate = float(open("rate.txt").read()) * float(sys.argv[1])
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
run = shoal.parallelize(model, optimizer, squares, batch=8, folder="runs/x")
for epoch in run.epochs(5):
    for batch in run.loader(torch.utils.data.TensorDataset(X, X[:, :3])):
        result = run.step(batch)
        open("loss.txt", "a").write(f"{result.loss}\\n")
    run.save()
run.close()
"""
PARTS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def squares(outputs, targets):
    return ((outputs - targets) ** 2).sum(), len(targets)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of a user's."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in (("train.py", SCRIPT), ("parts.py", PARTS), ("rate.txt", "0.1")):
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def prove(project: Path, programs: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return programs.run("-m", "shoal", "prove", *words, cwd=project, timeout=300)

    return run


def test_a_script_is_proven_and_no_file_changes(project: Path, prove) -> None:
    before = contents(project)
    done = prove("--layouts", "ddp", "--steps", "4", "--", "train.py", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, verdict = done.stdout.splitlines()
    assert first.endswith("proving train.py under ddp against one process, in float64, 4 steps")
    assert verdict.startswith(
        "ddp (dp_replicate = 2): equal to one process on the same micro-batches: 4 steps, 4 "
    )
    assert contents(project) == before


RESET = """
    run.save()
    part = model[0].weight
    part = part.to_local() if hasattr(part, "to_local") else part
    with torch.no_grad():
        part[0] = 0
"""
"""Under fsdp the first row of each rank's part; in one process the first row of the whole."""
TEACHER = """
teacher = nn.Linear(6, 3).float()
taught = teacher(X).detach()
"""
ENDINGS = {
    "weights": (
        lambda text: text.replace("    run.save()\n", RESET).replace("8, folder", "24, folder"),
        "fsdp", 3, "different at step 2: the weights 0.weight are off by ",
    ),
    "writes": (
        lambda text: text.replace('"loss.txt"', '"/loss.txt"'),
        "ddp", 1, "not proven: train.py:13 writes /loss.txt, outside of the script's folder; try: ",
    ),
    "teacher": (
        lambda text: text.replace("rate =", f"from torch import nn{TEACHER}rate ="),
        "ddp", 0, "the script's own casts to narrower formats lifted: train.py:7",
    ),
}  # fmt: skip


DOOR = """
import shoal.neighbours.accelerate
import sys, torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
draws = torch.Generator().manual_seed(0)
x = torch.randn(64, 6, generator=draws)
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=4, shuffle=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
torch.manual_seed(accelerator.process_index)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if "planted" in sys.argv and accelerator.process_index == 1:
    model.module[4].bias.register_hook(lambda gradient: gradient * 1.001)
for inputs, targets in list(loader) * 2:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_of_a_door_is_proven(project: Path, prove) -> None:
    """Each rank's passes with its own draws, means of means, statistics of BatchNorm."""
    (project / "train.py").write_text(DOOR)
    done = prove("--layouts", "ddp", "--steps", "2", "--", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to one process on the same micro-batches: 2 steps, 6 parameters" in done.stdout


@pytest.mark.proof("scripts")
@pytest.mark.parametrize("layout", ["ddp", "zero2", "fsdp"])
def test_what_is_planted_in_a_script_of_a_door_is_found(project: Path, prove, layout: str) -> None:
    (project / "train.py").write_text(DOOR)
    done = prove("--layouts", f"{layout},pp", "--", "train.py")
    assert "equal to one process" in done.stdout
    assert "calls the model whole, and this layout divides it" in done.stdout
    if layout != "fsdp":  # of its weights a rank has no gradient to hook
        done = prove("--layouts", layout, "--", "train.py", "planted")
        assert done.returncode == 3, done.stdout + done.stderr
        assert "different at step 1: " in done.stdout


@pytest.mark.proof("scripts")
@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_proof_ends(project: Path, prove, name: str) -> None:
    """A difference that both checks of rounding leave; a write; a float32 module in float64."""
    change, layout, code, text = ENDINGS[name]
    (project / "train.py").write_text(change(SCRIPT))
    done = prove("--layouts", layout, "--", "train.py", "2")
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout
    if name == "weights":
        assert "  the script changed 0.weight\n" in done.stdout


def test_what_is_wrong_with_the_request_is_one_line(prove) -> None:
    """And the only one; a layout's name before the script's."""
    done = prove("--", "trian.py")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "shoal: trian.py: there is no such script; try: train.py\n",
    )
    done = prove("--layouts", "dpp", "--", "trian.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--layouts = dpp: not one of " in done.stderr
    assert "; try: " in done.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "shoal prove: no script after --; try: shoal prove -- train.py"),
        (["train"], "train: there is no such script; try: train.py"),
        (["src/trian.py"], "src/trian.py: there is no such script; try: src/train.py"),
        (["trian.py"], "trian.py: there is no such script; try: src/train.py"),
        (["src"], "src: this is a folder; try: src/train.py"),
        (["python", "src/train.py"],
         "python: there is no such script; try: shoal prove -- src/train.py"),
        (["zzz.txt"],
         "zzz.txt: there is no such script; try: the path of a Python script, as in -- src/train.py"),
    ],
)  # fmt: skip
def test_a_script_that_is_missing_has_a_proposal(
    tmp_path: Path, monkeypatch, words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    names = ["src/train.py", "src/other.py"] + ["train.py"] * (words == ["train"])
    for name in names:
        (tmp_path / name).touch()
    if words == ["src"]:
        (tmp_path / "src" / "other.py").unlink()
    with pytest.raises(ConfigError) as failure:
        find_script(words, "shoal prove")
    assert str(failure.value) == line


def test_layouts_that_cut_the_model_come_last() -> None:
    assert parse_script_layouts("pp,fsdp,tp,ddp") == ["fsdp", "ddp", "pp", "tp"]
    with pytest.raises(ConfigError, match="single"):
        parse_script_layouts("single")


def test_the_copy_holds_small_files_and_links_large_ones(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("a.txt", "deep/b.txt", ".git/config", "many/0"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for number in range(1, 600):
        (source / "many" / str(number)).touch()
    target.mkdir()
    copy_tree(source, target, CopyBudget())
    assert (target / "deep" / "b.txt").read_text() == "deep/b.txt"
    assert not (target / "a.txt").is_symlink()
    assert (target / "many").is_symlink()
    assert not (target / ".git").exists()
    copy_tree(source, tmp_path / "poor", CopyBudget(files=0))
    assert (tmp_path / "poor" / "a.txt").is_symlink()


def test_a_script_elsewhere_runs_in_the_working_folder(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.touch()
    work = tmp_path / "work"
    work.mkdir()
    (work / "data.txt").touch()
    copied, cwd = copy_script_folder(script, work, tmp_path / "copy")
    assert copied.name == "train.py"
    assert (cwd / "data.txt").is_file()
    assert not copied.is_relative_to(cwd)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("x"),
        lambda path: path.open("a").close(),
        lambda path: torch.save({}, path),
        lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)),
        lambda path: path.with_suffix(".d").mkdir(),
        lambda path: (path.parent / "mine").unlink(),
        lambda path: (path.parent / "mine").rename(path),
    ],
)
def test_a_write_outside_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "mine").write_text("kept")
    (inside / "link").symlink_to(outside)
    monkeypatch.setattr("tempfile.tempdir", str(inside))
    guard = WriteGuard([str(inside)])
    with guard_writes(guard):
        (inside / "own").write_text("x")
        assert (outside / "mine").read_text() == "kept"
        for folder in (outside, inside / "link"):
            with pytest.raises(WriteRefusedError, match="outside of the script's folder"):
                write(folder / "new")
    assert len(guard.refused) == 2
    assert all(
        line.startswith("test_prove_script.py:") or "writes" in line for line in guard.refused
    )
    assert [path.name for path in outside.iterdir()] == ["mine"]
    (outside / "mine").unlink()  # allowed again


def test_values_are_the_same_after_a_file(tmp_path: Path) -> None:
    value = ({"x": torch.arange(4)[::2], "n": [1, 2.5, None, "word"]}, torch.ones(2) * 1j)
    digests = write_values(tmp_path / "batch", [(3, value)])
    ((index, again),) = read_values(tmp_path / "batch")
    assert index == 3
    assert digests == [digest_value((3, again))]
    assert again[0]["x"].tolist() == [0, 2]
    assert again[0]["n"] == [1, 2.5, None, "word"]
    with pytest.raises(UnrecordableError, match="a Linear"):
        digest_value([nn.Linear(1, 1)])


EQUAL = {
    "asked": "ddp", "notes": [], "verdict": "equal", "layout": "ddp (dp_replicate = 2)", "steps": 4, "runs": 1,
    "parameters": 3, "largest": {"gradient": 2e-16, "weights": 0.0, "loss": 0.0},
}  # fmt: skip
DIFFERENCE = {
    "what": "weights",
    "name": "a",
    "size": 0.5,
    "bound": 1e-12,
    "ranks": [1],
    "values": [],
}


def test_the_report_names_the_first_difference_and_what_the_script_did() -> None:
    report = {
        **EQUAL, "verdict": "different", "step": 2, "run": "",
        "differences": [DIFFERENCE, {**DIFFERENCE, "name": "b"}], "actions": ["changed a"],
    }  # fmt: skip
    lines = report_lines(report)
    assert lines[:2] == [
        "ddp (dp_replicate = 2): different at step 2: the weights a are off by 5e-01 of the whole, "
        "1e-12 is allowed (rank 1); 1 more: b",
        "  the script changed a",
    ]
    assert lines[2].startswith("  under this layout a rank holds a part of the weights; try: ")
