"""What a user can get wrong: one clear line, exit status 2, and no process was started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shoal.cli import main


def shoal(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; gives the exit status and what stands on standard error."""
    result: Result = CliRunner().invoke(main.app, arguments)
    failure = result.exception
    if failure is not None and not isinstance(failure, SystemExit):
        assert hasattr(failure, "exit_code"), f"not one of ours: {failure!r}"
        return failure.exit_code, str(failure)
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("train.micro_bach=3", "train.micro_bach: no such key; nearest: train.micro_batch"),
        ("trian.batch=3", "trian.batch: no such section; nearest: train.batch"),
        ("train.lr=3", "train.lr: no such key; nearest: optimizer.lr"),
        ("train.batch=abc", "train.batch = 'abc': a whole number is wanted, got text"),
        ("train.batch=2.5", "train.batch = 2.5: a whole number is wanted, got a number"),
        ("optimizer.betas=[1]", "optimizer.betas = [1]: a list of two numbers is wanted"),
        ("batch=3", "batch=3: overrides are written section.key=value; nearest: train.batch=3"),
        ("precision.compute=fp23", "precision.compute = fp23: not one of auto, fp64, fp32, bf16;"),
        ("optimizer.schedule=cosin", "nearest: cosine"),
        ("layout.strategy=dpp", "layout.strategy = dpp: not one of single, ddp"),
        ("layout.strategy=fsdp", "layout.strategy = fsdp: not built in this version"),
        ("layout.tp=2", "layout.tp = 2: not built in this version"),
        ("layout.dp_replicate=3 launch.processes=4", "nearest legal: layout.dp_replicate=4"),
        ("layout.strategy=single launch.processes=2", "nearest legal: launch.processes=1"),
        ("train.batch=10 train.micro_batch=4 launch.processes=2", "nearest legal: train.batch=8"),
        ("train.batch=10 train.accumulate=3 launch.processes=2", "nearest legal: train.batch=12"),
        ("memory.recompute=full", "memory.recompute: not built in this version"),
        ("model.dmi=3", "model.dmi: no such argument of llama; nearest: model.dim"),
        ("model.name=lama", "nearest: model.name=llama"),
        ("model.dim=250 model.heads=4", "nearest legal: model.dim=2"),
        ("model.name=llama-3-8b", "the guide says fsdp, which this version does not build"),
        ("model.name=llama-3-70b", "the guide says 3d"),
        ("model.build=nowhere:build", "model.build = nowhere:build: no module nowhere"),
        ("model.build=json", "model.build = json: is written pkg.mod:function"),
        ("model.build=json:laods", "has no laods"),
        ("data.source=text:missing/*.txt", "text:missing/*.txt"),
        ("data.source=tokens:missing", "tokens:missing"),
        ("data.source=stdlb", "nearest: stdlib"),
        ("data.source=nowhere:make", "nowhere"),
        ("train.steps=-1", "train.steps = -1: at least 0 is wanted"),
        ("train.steps=5 train.epochs=1", "one of them decides the length"),
        ("launch.nodes=2", "torchrun"),
        ("missing.toml", "missing.toml: no such file"),
    ],
)
def test_one_line_and_two(argument: str, said: str, tmp_path: Path) -> None:
    code, text = shoal("train", *argument.split())
    assert code == 2
    line = text.strip().splitlines()[-1]
    assert said in line
    assert len(text.strip().splitlines()) <= 2, text  # the first line of train, then the error
    assert not (tmp_path / "runs").exists(), "nothing was started or written"


def test_resume_of_nothing(tmp_path: Path) -> None:
    code, text = shoal("train", "--resume", "runs/none")
    assert code == 2
    assert "runs/none: no run there" in text
    folder = tmp_path / "runs" / "empty"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    code, text = shoal("train", "--resume", "runs/empty")
    assert code == 2
    assert "holds no complete checkpoint" in text


def test_a_used_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    code, text = shoal("train", "run.name=mine")
    assert code == 2
    assert "shoal train --resume runs/mine" in text


def test_aliases_are_answered_with_our_names() -> None:
    from shoal.config.load import load

    loaded = load(None, ["train.train_batch_size=8", "optimizer.gradient_clipping=0.5"])
    assert loaded.config.train.batch == 8
    assert loaded.config.optimizer.clip == 0.5
    assert "train.train_batch_size is called train.batch here" in loaded.notices[0]


def test_a_file_with_a_mistake_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nbatch = 'x'\n")
    code, text = shoal("train", "run.toml")
    assert code == 2
    assert "run.toml: train.batch = 'x': a whole number is wanted" in text
    (tmp_path / "run.toml").write_text("[train\n")
    assert "run.toml: is not TOML" in shoal("train", "run.toml")[1]


@pytest.mark.parametrize("verb", ["list", "verify", "export"])
def test_checkpoint_verbs_on_nothing(verb: str) -> None:
    extra = ["out.safetensors"] if verb == "export" else []
    code, text = shoal("checkpoint", verb, "nowhere", *extra)
    assert code == 2
    assert "nowhere: no complete checkpoint there" in text


def test_the_real_program_prints_one_line_on_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "train", "train.micro_bach=3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=20)
    assert done.returncode == 2
    assert done.stderr == (
        "shoal: command line: train.micro_bach: no such key; nearest: train.micro_batch\n"
    )
