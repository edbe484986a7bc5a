"""The end of a run: what it adds never changes how a finished training ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.base.layouts.layout import Layout
from shoal.trainer.jobs import run_end


def run_of(layout: Layout, together: bool = False, keeps: bool = True) -> Any:
    """What `finish` asks of a run."""
    one = SimpleNamespace(size=1)
    told: list[str] = []
    program = SimpleNamespace(
        together=together, pipe=one, tensor=one, context=one, plan=SimpleNamespace(layout=layout)
    )
    world = SimpleNamespace(writes_files=keeps)
    return SimpleNamespace(
        world=world, program=program, model=None, recorder=SimpleNamespace(notice=told.append),
        told=told,
    )  # fmt: skip


@pytest.mark.parametrize("failure", [ConfigError("one\ntwo"), RuntimeError(""), MemoryError("x")])
def test_a_sample_that_fails_is_one_line(monkeypatch: Any, failure: Exception) -> None:
    def fails(*_given: Any) -> None:
        raise failure

    monkeypatch.setattr(run_end, "generate_sample", fails)
    run = run_of(Layout())
    assert run_end._try_sample(run, SimpleNamespace()) is None  # type: ignore[arg-type]
    (line,) = run.told
    assert line.startswith("no sample of what the model writes: ")
    assert "\n" not in line


def test_others_ranks_write_nothing_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(run_end, "generate_sample", lambda *_: "text")
    assert run_end._try_sample(run_of(Layout(), keeps=False), SimpleNamespace()) is None  # type: ignore[arg-type]
    together = run_of(Layout(), together=True, keeps=False)
    assert run_end._try_sample(together, SimpleNamespace()) == "text"  # type: ignore[arg-type]


WORDS = ["model.dim=32", "model.layers=2", "model.heads=2", "data.sequence=32", "train.batch=8", "train.steps=3", "train.micro_batch=2", "train.prove=off", "precision.compute=fp32", "run.name=x"]  # fmt: skip
SERVERS = "launch.processes=3 layout.strategy=parameter-server"


@pytest.mark.proof("faults")
@pytest.mark.parametrize(
    "layout",
    [
        f"{SERVERS} layout.serves=embeddings model.tied=false",
        f"{SERVERS} layout.updates=asynchronous",
        "launch.processes=2 layout.pp=2",
        "launch.processes=2 layout.strategy=fsdp",
        "launch.processes=1 islands.method=diloco islands.count=2 islands.period=2",
    ],
)
def test_a_finished_training_ends_with_0(tmp_path: Path, layout: str) -> None:
    words = [sys.executable, "-m", "shoal", "train", *WORDS, *layout.split()]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "no sample of what" not in ended.stdout


BREAKER = """
import shoal.models.generate

def fails(*given, **named):
    raise MemoryError("no room for the cache of keys\\nand values")

def hook(record):
    shoal.models.generate.generate = fails
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize(
    "layout",
    ["launch.processes=1", "launch.processes=2", "launch.processes=2 layout.strategy=fsdp"],
)
def test_a_command_whose_sample_fails_ends_with_0(
    programs: Any, tmp_path: Path, layout: str
) -> None:
    """After all training, on all ranks or on those that write."""
    (tmp_path / "breaker.py").write_text(BREAKER)
    words = [*WORDS, *layout.split(), "train.on=breaker:hook"]
    ended = programs.run("-m", "shoal", "train", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "no sample of what the model writes: no room for the cache of keys" in ended.stdout
    assert (tmp_path / "runs/x/checkpoints/step-3/manifest.json").exists()
