"""A run that begins with pretrained weights: their own tokenizer, and their loss before any step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forks import Forks

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def write_model(folder: Path, texts: list[str]) -> None:
    """A tiny Qwen2 with a tokenizer of its own, as transformers saves both."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=300, special_tokens=["<|endoftext|>"])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="<|endoftext|>"
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(wrapped), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def test_the_gain_is_seen_from_step_0(tmp_path: Path, programs: Forks) -> None:
    rows = [{"prompt": f"{n} and one: ", "completion": str(n + 1)} for n in range(100)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(tmp_path / "base", [json.dumps(row) for row in rows])
    words = [
        "model.name=hf:base", "data.source=jsonl:sums.jsonl", "data.validation=0.3", "train.batch=8",
        "data.sequence=32", "train.steps=2", "launch.processes=1", "run.name=one",
    ]  # fmt: skip
    done = programs.run("-m", "shoal", "train", *words, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/one/events.jsonl").open()]
    before, after = [event for event in events if event["event"] == "validated"]
    assert (before["step"], after["step"]) == (0, 2)
    assert before["loss"] != after["loss"]
    assert f"loss {after['loss']:.4f} ({before['loss']:.4f} before training)" in done.stdout
    toml = (tmp_path / "runs/one/run.toml").read_text()
    assert 'tokenizer = "base/tokenizer.json"' in toml
    again = programs.run(
        "-m", "shoal", "train", "--resume", "runs/one", "train.steps=3", cwd=tmp_path
    )
    assert again.returncode == 0, again.stdout + again.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/one/events.jsonl").open()]
    assert [e["step"] for e in events if e["event"] == "validated"] == [0, 2, 3]
