"""Models of transformers that a user changed, run in a loop of their own: exported as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.export.export_folder import export_folder
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.data.files.documents import Document
from shoal.data.text.single_pass_text import SinglePassTexts
from shoal.data.text.text_files import train_bpe_on
from shoal.models.huggingface import PROBE, describe_tokenizer_mismatch
from shoal.trainer.run_folder.hub_files import write_hub_tokenizer

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2, 18).view(2, 8)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    told = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**told, **heads, **more))


def exported(model: nn.Module, folder: Path, **policies: Any) -> tuple[Path, dict[str, Any]]:
    """A step in a loop of one's own, saved and exported: (the folder, the run's weights)."""

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        rows = outputs["logits"].transpose(1, 2).float()
        return nn.functional.cross_entropy(rows, targets, reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.parallelize(model, optimizer, loss, folder=folder / "run", **policies) as run:
        run.step((TOKENS, TOKENS.flip(1)))
        run.save()
        weights = run.state_dict()
    saved = list_checkpoints(folder / "run" / "checkpoints")[0].path
    export_folder(saved, folder / "out")
    return folder / "out", weights


def opened(out: Path, weights: dict[str, Any]) -> Any:
    """What transformers makes of a folder, once it holds just these weights."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading.values()), loading
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    return model


def tie_head(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def tie_layers(model: Any) -> None:
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def untie_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("tied", "change", "twice"),
    [
        (False, tie_head, ["lm_head.weight"]),
        (True, tie_layers, ["model.layers.1.self_attn.q_proj.weight"]),
        (True, untie_head, []),
        (True, lambda model: None, []),
        (False, lambda model: model.resize_token_embeddings(70), []),
    ],
)
def test_ties_are_as_the_user_made_them(
    tmp_path: Path, tied: bool, change: Callable[[Any], None], twice: list[str]
) -> None:
    model = llama(tie_word_embeddings=tied)
    change(model)
    out, weights = exported(model, tmp_path)
    again = opened(out, weights)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model.eval()(TOKENS).logits)
    record = read_manifest(list_checkpoints(tmp_path / "run" / "checkpoints")[0].path).record
    assert record["transformers"] == {"untold_ties": twice}


@pytest.mark.parametrize(
    ("own", "precision", "stored"),
    [
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float32, "bf16", "float32"),
        (torch.float32, "fp64", "float64"),
    ],
)
def test_the_configuration_names_the_format_of_the_weights(
    tmp_path: Path, own: torch.dtype, precision: str, stored: str
) -> None:
    model = llama(dtype="float16").to(own)
    out, weights = exported(model, tmp_path, precision=precision)
    assert json.loads((out / "config.json").read_text())["dtype"] == stored
    assert opened(out, weights).dtype == getattr(torch, stored)


def test_a_cache_that_was_off_for_training_is_on_again(tmp_path: Path) -> None:
    model = llama()
    model.config.use_cache = False
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    out, weights = exported(model, tmp_path)
    again = opened(out, weights)
    assert again.config.use_cache
    assert again.generation_config.temperature == 0.5
    assert not model.config.use_cache, "the user's own stays"


def test_a_configuration_that_is_no_json_stops_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    model.config.mine = {1, 2}
    (tmp_path / "run" / "hub").mkdir(parents=True)
    (tmp_path / "run" / "hub" / "config.json").write_text("{}")  # of another run
    out, _ = exported(model, tmp_path)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (
        "model: its config cannot be written (Object of type set is not JSON serializable), so "
        "what `shoal checkpoint export` writes of this run has no config.json"
    ) in caplog.text


def test_a_later_save_keeps_the_later_configuration(tmp_path: Path) -> None:
    exported(llama(), tmp_path)
    model = llama(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    (tmp_path / "run").rename(tmp_path / "earlier")
    (tmp_path / "earlier" / "checkpoints").rename(tmp_path / "its checkpoints")
    (tmp_path / "earlier").rename(tmp_path / "run")
    out, weights = exported(model, tmp_path)
    assert opened(out, weights).config.rope_parameters["rope_theta"] == 77.0


class Around(nn.Module):
    """A model of one's own with one of transformers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = llama()

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.inside(tokens)


def test_a_model_with_one_inside_has_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "run" / "hub").mkdir(parents=True)
    (tmp_path / "run" / "hub" / "config.json").write_text("{}")  # of another run
    out, _ = exported(Around(), tmp_path)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_a_tokenizer_put_into_the_run_goes_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (tmp_path / "run").mkdir()
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "run" / "hub")
    out, _ = exported(llama(), tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again("b a b")["input_ids"] == [1, 0, 1]
    assert again.chat_template == "{{ messages }}"


def test_a_tokenizer_that_transformers_reads_otherwise_is_told(tmp_path: Path) -> None:
    """Of a qwen2 it takes its own class, whatever tokenizer_config.json says."""
    words = tmp_path / "words.txt"
    words.write_text("a naïve text, of 12345 words: don't\n" * 9)
    made = train_bpe_on(
        SinglePassTexts([Document("words.txt", str(words), words.stat().st_size, 0)], []).sample(),
        300,
    )
    write_hub_tokenizer(made, "bpe:300", tmp_path)
    for kind, line in {
        "llama": "",
        "qwen2": "tokenizer: AutoTokenizer is Qwen2Tokenizer for this model, and cuts text "
        "otherwise; try: transformers.PreTrainedTokenizerFast.from_pretrained"
        f'("{tmp_path}/hub")',
        "no such kind": "",
    }.items():
        (tmp_path / "hub" / "config.json").write_text(json.dumps({"model_type": kind}))
        assert describe_tokenizer_mismatch(tmp_path / "hub") == line
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hub")
    assert plain(PROBE)["input_ids"] == made.encode(PROBE).ids
    (tmp_path / "hub" / "tokenizer_config.json").write_text("[]")
    assert "AutoTokenizer does not open it (" in describe_tokenizer_mismatch(tmp_path / "hub")
