"""[tune] on the command line: what is foreseen, what is refused, and what a resume goes on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.proof
pytest.importorskip("peft")

TUNE = ("tune.adapter=lora", "tune.rank=4")
LAYOUT = {
    "layout.dp_replicate=2": (),
    "layout.tp=2": ("layout.dp_replicate=1", "layout.tp=2"),
}
DATA = ("data.sequence=32", "data.tokenizer=bpe:300", "train.seed=3")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama of transformers in `base`, and a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tune")
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "base")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"a line of number {number}\n" * 60)
    return folder


def shoal(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a command over the tiny model says."""
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=place, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def train(place: Path, *words: str) -> None:
    """Train the tiny model on two processes, to a good end."""
    said = shoal(place, "train", *words)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]


def begin(place: Path, run: str, steps: int) -> None:
    """A run under ddp."""
    train(place, "model.name=hf:base", "data.source=text:text/*.txt", *DATA, *TUNE,
          "launch.processes=2", "train.batch=8", "train.micro_batch=2", f"run.name={run}",
          "optimizer.schedule=constant", "layout.dp_replicate=2", f"train.steps={steps}")  # fmt: skip


def adapter(place: Path, run: str) -> dict[str, Any]:
    """The adapters that a run ended with."""
    from safetensors.torch import load_file

    said = shoal(place, "checkpoint", "export", f"runs/{run}", f"{run}-adapter", "--adapter")
    assert said.returncode == 0, said.stderr
    return load_file(place / f"{run}-adapter" / "adapter_model.safetensors")


def test_a_plan_counts_what_trains(place: Path) -> None:
    said = shoal(
        place, "plan", "model.name=hf:base", *DATA, *TUNE, "layout.dp_replicate=2", "--json"
    )
    assert said.returncode == 0, said.stderr
    assert not said.stderr
    plan = json.loads(said.stdout)
    # q and o 32 → 32, k and v 32 → 16, gate and up 32 → 64, down 64 → 32, each with two matrices
    by_hand = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 64) + (64 + 32))
    assert plan["model"]["parameters"] == by_hand


@pytest.mark.parametrize("command", ["train", "plan"])
def test_adapters_on_no_layer_are_refused(place: Path, command: str) -> None:
    said = shoal(place, command, "model.name=hf:base", *DATA, *TUNE, "tune.targets=q_porj")
    assert said.returncode == 2
    (line,) = [line for line in said.stderr.splitlines() if line.startswith("shoal: ")]
    assert line.endswith(
        "tune.targets: q_porj is the end of no layer's name in LlamaForCausalLM; try: q_proj"
    )


@pytest.mark.parametrize("layout", LAYOUT)
def test_a_resume_goes_on_with_the_same_adapters(place: Path, layout: str) -> None:
    """Six steps at once under ddp, and four and two more: to the bit under ddp itself."""
    if not (place / "runs" / "whole").exists():
        begin(place, "whole", 6)
    name = layout.rpartition(".")[2].replace("=", "")
    begin(place, name, 4)
    train(place, "--resume", f"runs/{name}", "train.steps=6", *LAYOUT[layout])
    whole, resumed = adapter(place, "whole"), adapter(place, name)
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        apart = float((value - resumed[key]).abs().max())
        assert apart == 0 if "dp" in layout else apart < 1e-5, key
        assert ".lora_B." not in key or float(value.abs().max()) > 0, "else nothing was trained"
