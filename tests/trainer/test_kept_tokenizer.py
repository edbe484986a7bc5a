"""A loop of one's own keeps its tokenizer: for exports, and to be written on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from typer.testing import CliRunner

import shoal
from shoal.checkpoint.export.export_folder import export_folder
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.cli.main import app

WORDS = {"a": 0, "b": 1, "c": 2, "<|endoftext|>": 3}


def plain() -> Tokenizer:
    return Tokenizer(models.WordLevel(WORDS, unk_token="a"))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_every_save_keeps_it_and_writes_it_once(tmp_path: Path) -> None:
    run = shoal.parallelize(nn.Linear(2, 3), sgd, folder=tmp_path, tokenizer=plain())
    run.save()
    kept = tmp_path / "hub" / "tokenizer.json"
    assert kept.read_text() == plain().to_str()
    before = kept.stat().st_mtime_ns
    run.save(tag="best")
    assert kept.stat().st_mtime_ns == before
    assert not (tmp_path / "tags" / "best" / "hub").exists(), "the run's is its too"
    kept.write_text("{")
    run.save()
    assert kept.read_text() == plain().to_str()
    run.close()


def test_what_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(shoal.ConfigError) as caught:
        shoal.parallelize(nn.Linear(2, 3), sgd, tokenizer="bpe:300")
    assert str(caught.value) == (
        "tokenizer = bpe:300: a tokenizer of the library tokenizers, or of transformers, is "
        "wanted; try: open_data(…).tokenizer, or AutoTokenizer.from_pretrained(…)"
    )


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
def test_a_run_of_ones_own_is_exported_with_it_and_writes_on(tmp_path: Path, kind: str) -> None:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 16}
    ends = {"bos_token_id": 3, "eos_token_id": 3}
    made = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=4, **sizes, **heads, **ends))
    given: Any = plain()
    if kind == "transformers":
        given = hf.PreTrainedTokenizerFast(tokenizer_object=given, eos_token="<|endoftext|>")
        given.chat_template = "{{ messages }}"
    folder = tmp_path / "run"
    run = shoal.parallelize(made, sgd, call="kwargs", folder=folder, tokenizer=given)
    run.save()
    run.close()
    out = tmp_path / "out"
    export_folder(list_checkpoints(folder / "checkpoints")[0].path, out)
    opened = hf.AutoTokenizer.from_pretrained(out)
    assert opened("b", add_special_tokens=False)["input_ids"] == [1]
    assert opened.eos_token == "<|endoftext|>"
    assert (opened.chat_template is not None) == (kind == "transformers")
    words = ("sample", str(folder), "--prompt", "b", "--tokens", "5", "--temperature", "0")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ids = made.generate(torch.tensor([[1]]), max_new_tokens=5, do_sample=False)[0].tolist()
    assert done.output.strip() == plain().decode(ids)


@pytest.mark.proof
def test_a_run_of_ones_own_without_a_tokenizer_says_how_to_keep_one(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    made = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=4, num_attention_heads=2, **sizes))
    run = shoal.parallelize(made, sgd, call="kwargs", folder=tmp_path)
    run.save()
    run.close()
    failure = CliRunner().invoke(app, ("sample", str(tmp_path), "--prompt", "b")).exception
    hub = str(tmp_path / "hub")
    assert str(failure) == (
        f"{tmp_path}: keeps no hub/tokenizer.json; try: shoal.parallelize(…, tokenizer=…), or "
        f"tokenizer.save_pretrained({hub!r})"
    )
