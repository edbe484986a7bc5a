"""`shoal train --dry-run` prints what a person checks before the start, counted where that is cheap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cli.run_outline import count_samples, outline_lines
from shoal.config.sections import Config, DataSection, TrainSection


def outline(data: DataSection, **train: int) -> list[str]:
    """The lines about a run."""
    section = replace(TrainSection(), **{"batch": 64, **train})
    return outline_lines(replace(Config(), data=data, train=section), Path("runs/x"))


def test_sources_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "train.bin").write_bytes(bytes(4000))
    rows = count_samples(DataSection(source=f"jsonl:{tmp_path}/*.jsonl"))
    assert rows == (2, "1 file, 28 B, 2 rows")
    tokens = DataSection(source=f"tokens:{tmp_path}", dtype="uint16", sequence=100)
    assert count_samples(tokens) == (20, "1 file, 3.9 KiB, 2.0K tokens, 20 samples")
    assert count_samples(replace(tokens, dtype="auto"))[0] == 0
    assert count_samples(DataSection(source="my.data:make")) == (0, "")
    assert count_samples(DataSection(source="jsonl:s3://b/*.jsonl"))[0] == 0
    lines = outline(tokens, steps=10)
    assert "length: 10 steps × 64 samples of 100 tokens = 64.0K tokens" in lines
    assert "held out: 0.02 of the data, about 1 of 20, validated at the end" in lines
    (tmp_path / "val.bin").write_bytes(bytes(400))
    assert any(line.startswith("held out: the files val*") for line in outline(tokens, steps=10))


def test_epochs_are_steps_where_the_samples_are_known() -> None:
    lines = outline(DataSection(source="digits"), epochs=3, validate_every=5)
    assert "length: 3 epochs, in steps of 64 samples, about 84 steps" in lines
    assert (
        "held out: 0.02 of the data, about 36 of 1797, validated every 5 steps and at the end"
        in lines
    )
    assert len(lines) == 6
    assert "held out: nothing (data.validation = 0)" in outline(
        DataSection(source="digits", validation="0")
    )
    assert any("all of text:x" in line for line in outline(DataSection(validation="text:x")))


def test_a_dry_run_prints_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    words = ["train", "--dry-run", "data.source=text:*.txt", "launch.processes=1"]
    told = CliRunner().invoke(app, words).output.splitlines()
    heads = [line.partition(":")[0] for line in told]
    first = heads.index("layout")
    wanted = ["model", "length", "data", "held out", "optimizer", "saves", "foreseen"]
    assert heads[first + 1 : first + 8] == wanted
    assert "data: text:*.txt: 1 file, 4 B; tokenizer bpe:2048" in told
