"""`shoal find micro-batch`: its answer fits under a limit, twice as much does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.find_batch import free_bytes, parse_bytes, search_power_of_two

SRC = Path(__file__).resolve().parents[2] / "src"
MODEL = """
import torch
from torch import nn

WIDE = 2**20  # 4 MiB for each sample and layer

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, inputs):
        held = inputs.repeat(1, WIDE) * self.weight
        for _ in range(3):
            held = (held * self.weight).exp().clamp(max=1.0)
        if BROKEN and len(inputs) > 1:
            raise ValueError("a fault of the model's own")
        return held.mean(1, keepdim=True)

BROKEN = False

def build():
    return Wide()

def data():
    return [(torch.zeros(1), torch.zeros(1))] * 512

def loss(outputs, targets):
    return (outputs - targets).square().sum(1)
"""
WORDS = ["model.build=wide:build", "model.loss=wide:loss", "data.source=wide:data",
         "precision.compute=fp32", "optimizer.clip=0", "data.validation=0", "train.batch=16",
         "optimizer.lr=0.001"]  # fmt: skip


def found(folder: Path, *words: str, broken: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "wide.py").write_text(MODEL.replace("BROKEN = False", f"BROKEN = {broken}"))
    command = [sys.executable, "-m", "shoal", "find", "micro-batch", *WORDS, *words]
    environ = {**os.environ, "PYTHONPATH": f"{SRC}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_its_answer_fits_and_twice_as_much_does_not(tmp_path: Path, layout: str) -> None:
    words = ["launch.processes=2", f"layout.strategy={layout}", "--memory", "900MiB", "--json"]
    done = found(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    size = told["micro_batch"]
    assert told["tries"][str(size)] == ""
    assert "memory" in told["tries"][str(2 * size)]
    assert told["foreseen"] >= 1
    assert not (tmp_path / "runs").exists(), "nothing is written"


@pytest.mark.proof
def test_more_memory_holds_more(tmp_path: Path) -> None:
    """The limit is imposed, not only looked at."""
    sizes = []
    for memory in ("700MiB", "1500MiB"):
        done = found(tmp_path, "launch.processes=1", "--memory", memory, "--json")
        assert done.returncode == 0, done.stderr
        sizes.append(json.loads(done.stdout.splitlines()[-1])["micro_batch"])
    assert sizes[0] < sizes[1]


@pytest.mark.proof
def test_another_death_is_no_lack_of_memory(tmp_path: Path) -> None:
    done = found(tmp_path, "launch.processes=1", "--memory", "2GiB", broken=True)
    assert done.returncode == 1
    assert "a fault of the model's own" in done.stderr
    assert "train.batch: tries do not take it, each has its own" in done.stderr
    assert "train.micro_batch=" not in done.stdout


def test_the_search_tries_no_size_twice() -> None:
    for limit in (0, 1, 8, 64):
        for guess in (1, 4, 64):
            tried: list[int] = []

            def fits(size: int, limit: int = limit, tried: list[int] = tried) -> bool:
                tried.append(size)
                return size <= limit

            assert search_power_of_two(guess, 64, fits) == limit
            assert len(set(tried)) == len(tried)
            assert limit == 64 or max(limit, 0.5) * 2 in tried, "the next one was tried"


@pytest.mark.parametrize("word", ["2", "0GiB", "GiB", "two GiB"])
def test_a_size_that_is_none_is_one_line(word: str) -> None:
    with pytest.raises(ConfigError, match="try: 2GiB"):
        parse_bytes(word)


def test_memory_that_is_free() -> None:
    assert 0 < free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
