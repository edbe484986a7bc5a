"""transformers models from a folder: unmodified, from our seed or from safetensors, else one line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from typer.testing import CliRunner

from forks import Forks
from shoal.base.errors import ConfigError, PlanError
from shoal.checkpoint.foreign.import_weights import import_weights
from shoal.cli.main import app
from shoal.cli.start import prepare_run
from shoal.config.sections import Config, DataSection, ModelSection
from shoal.data.files.token_files import SyntheticTokens
from shoal.data.sources import Source
from shoal.forecast.models.model_facts import count_model_parameters
from shoal.models.catalog import build
from shoal.models.generate import generate
from shoal.models.loss import token_loss
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trainer.jobs.configured_run import build_model

transformers = pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "use_cache": True,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61,
    "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
VIT = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
    "patch_size": 2, "num_channels": 1, "id2label": {str(n): f"digit {n}" for n in range(10)},
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> str:
    """The model's name for a folder that holds this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def saved(folder: Path, config: dict[str, Any]) -> tuple[str, torch.nn.Module]:
    """A folder as `save_pretrained` leaves it, and the model it was saved from."""
    torch.manual_seed(1)
    model = build(write(folder, config), {})
    model.save_pretrained(folder)
    return f"hf:{folder}", model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("config", [LLAMA, GPT2, VIT])
def test_it_is_the_librarys_own_model_from_our_seed(tmp_path: Path, config: dict[str, Any]) -> None:
    name = write(tmp_path / "m", config)
    torch.manual_seed(5)
    ours = build(name, {}, sequence=64)
    torch.manual_seed(5)
    kind = config.get("architectures", ["GPT2LMHeadModel"])[0]
    theirs = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(tmp_path / "m"))
    assert type(ours) is type(theirs)
    assert same(ours, theirs)
    assert ours.training
    torch.manual_seed(6)
    assert not same(build(name, {}), theirs)
    assert same(build(name, {}), build(f"{name}/config.json", {})) is False  # drawn one by one


def test_the_default_loss_reads_its_logits_unshifted(tmp_path: Path) -> None:
    model = build(write(tmp_path / "m", LLAMA), {}, vocabulary=61, sequence=64).double()
    tokens = torch.randint(61, (2, 17))
    outputs = model(tokens[:, :-1])
    assert outputs.past_key_values is None  # no cache
    assert model.generation_config.use_cache  # which is for training alone
    total, count = token_loss(outputs, tokens[:, 1:])
    by_hand = F.cross_entropy(outputs.logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(total.detach() / count) == pytest.approx(float(by_hand.detach()), rel=1e-12)
    # the library's own loss shifts by itself: the same number from the unshifted sequence
    shifted = model(tokens, labels=tokens).loss
    assert float(shifted.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-6)
    total.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_beside_the_config_are_read(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    name, model = saved(tmp_path / "m", {**LLAMA, "dtype": "bfloat16"})
    capfd.readouterr()
    found = build(name, {})
    assert capfd.readouterr().err == ""  # no bars beside the run's own screen
    assert same(found, model)
    assert all(p.dtype == torch.float32 for p in found.parameters())
    assert not same(build(f"{name}/config.json", {}), model)  # the file alone: new weights


TIED = {**LLAMA, "tie_word_embeddings": True}


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2])
def test_pickled_weights_are_imported_and_built(tmp_path: Path, config: dict[str, Any]) -> None:
    """Whatever order a file names tied weights in, and whichever name is kept."""
    name = write(tmp_path / "hub", config)
    torch.manual_seed(1)
    model = build(name, {})
    state = model.state_dict()
    torch.save({n: state[n] for n in sorted(state)}, tmp_path / "hub" / "pytorch_model.bin")
    done = import_weights(tmp_path / "hub", tmp_path / "out")
    assert done.tensors == len({tensor.data_ptr() for tensor in state.values()})
    assert same(build(f"hf:{tmp_path / 'out'}", {}), model)


def test_narrow_and_split_weights_become_fp32(tmp_path: Path) -> None:
    name, model = saved(tmp_path / "m", LLAMA)
    for path in (tmp_path / "m").glob("*.safetensors"):
        path.unlink()
    model.bfloat16().save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    found = build(name, {})
    assert all(p.dtype == torch.float32 for p in found.parameters())
    assert same(found.bfloat16(), model)


def test_shapes_alone_read_no_weights(tmp_path: Path) -> None:
    name, _ = saved(tmp_path / "m", LLAMA)
    with torch.device("meta"):
        assert all(p.is_meta for p in build(name, {}).parameters())
    facts = trace_facts(lambda: build(name, {}), torch.zeros(2, 8, dtype=torch.int64))
    assert facts.trainable == sum(p.numel() for p in build(name, {}).parameters())
    assert (
        count_model_parameters(name) is None
    )  # nobody but transformers can say, and that costs seconds


def test_too_many_stages_are_refused_before_anything_is_imported(tmp_path: Path) -> None:
    name = write(tmp_path / "m", LLAMA)
    asked = [f"model.name={name}", "layout.pp=2", "layout.schedule=interleaved", "layout.chunks=4",
             "launch.processes=2", "data.sequence=16"]  # fmt: skip
    with pytest.raises(PlanError) as caught:
        prepare_run(asked, None)
    assert str(caught.value) == (
        f"layout.pp = 2 × 4 stages per rank (layout.schedule = interleaved) = 8: more stages than "
        f"the 2 blocks of {name}; try: layout.schedule=1f1b"
    )


def test_generates(tmp_path: Path) -> None:
    model = build(write(tmp_path / "m", GPT2), {})
    assert generate(model, torch.zeros(1, 4, dtype=torch.int64), 2, 0.0).shape == (1, 6)


def test_a_job_builds_it(tmp_path: Path) -> None:
    data = SyntheticTokens(4, 16, 61, 0)
    source = Source(data, None, None, 61, None, None, "synthetic: 4 samples", "tokens")
    name = write(tmp_path / "m", LLAMA)
    assert (
        type(
            build_model(Config(ModelSection(name=name), data=DataSection(sequence=16)), source)
        ).__name__
        == "LlamaForCausalLM"
    )
    with pytest.raises(ConfigError, match="longer than the 64 positions"):
        build_model(Config(ModelSection(name=name), data=DataSection(sequence=65)), source)


def refusal(name: str, arguments: dict[str, Any] | None = None, **known: int) -> str:
    with pytest.raises(ConfigError) as caught:
        build(name, arguments or {}, **known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_that_are_found_before_the_start(tmp_path: Path) -> None:
    name = write(tmp_path / "mine", LLAMA)
    folder = tmp_path / "mine"
    assert refusal(f"hf:{tmp_path}/mime") == (
        f"model.name = hf:{tmp_path}/mime: there is no file {tmp_path}/mime/config.json; "
        f"try: hf:{folder}"
    )
    assert refusal(name, {"layers": 2}) == (
        f"model.layers: {name} takes its arguments from {folder}/config.json; try: change "
        f"them there"
    )
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert refusal(name) == (
        f"model.name = {name}: pytorch_model.bin is a pickle, which runs code when it is read; "
        f"try: shoal checkpoint import {folder} {folder}, which runs none, or "
        f"{name}/config.json for new weights"
    )
    build(f"{name}/config.json", {})
    (folder / "config.json").write_text("{")
    assert "config.json is no JSON" in refusal(name)
    (folder / "config.json").write_text("[]")
    assert "has no model_type; give a transformers config.json" in refusal(name)
    with pytest.raises(ConfigError, match="has no model_type"):  # where the command line looks
        count_model_parameters(name)


def test_transformers_missing_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path / "m", LLAMA)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "transformers" else found(n, *a)
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(name) == (
        f"model.name = {name}: needs transformers, which is not installed; try: "
        f"pip install 'shoal[hf]'"
    )


def test_data_that_do_not_fit(tmp_path: Path) -> None:
    name = write(tmp_path / "m", {**LLAMA, "vocab_size": 300})
    assert refusal(name, vocabulary=2048) == (
        f"model.name = {name}: vocab_size 300 is less than the 2048 of the tokenizer; try: "
        f"data.tokenizer=bpe:300"
    )
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert refusal(name, vocabulary=2048).endswith(
        f"try: data.tokenizer={tmp_path}/m/tokenizer.json"
    )
    assert refusal(name, vocabulary=300, sequence=65) == (
        f"data.sequence = 65: longer than the 64 positions of {name}; try: data.sequence=64"
    )


def test_classes_and_weights_that_do_not_fit(tmp_path: Path) -> None:
    assert "which is no model of transformers" in refusal(
        write(tmp_path / "a", {**LLAMA, "architectures": ["MyOwnModel"]})
    )
    assert "vit has no causal language model" in refusal(
        write(tmp_path / "b", {k: v for k, v in VIT.items() if k != "architectures"})
    )
    assert "its config.json cannot be used" in refusal(
        write(tmp_path / "c", {"model_type": "nothing-known"})
    )
    name, _ = saved(tmp_path / "d", LLAMA)
    write(tmp_path / "d", {**LLAMA, "hidden_size": 64})
    assert "its weights cannot be used" in refusal(name)
    write(tmp_path / "d", {**LLAMA, "num_hidden_layers": 3})
    assert "its weights lack 9 tensors of LlamaForCausalLM, model.layers.2." in refusal(name)


def shoal(*words: str) -> str:
    """Run a command in this process; what it prints."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return str(done.stdout).removesuffix("\n")


def test_shoal_trains_it_on_text_samples_it_and_exports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Forks
) -> None:
    """The main job, end to end: two steps on text, and back to the library."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny", {**LLAMA, "vocab_size": 512, "dtype": "bfloat16"})
    (tmp_path / "tiny" / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 40}')
    words = [
        "model.name=hf:tiny", f"data.source=text:{docs}/*.md", "data.tokenizer=bpe:512", "data.sequence=64", "train.steps=2",
        "data.validation=0.005", "launch.processes=1", "run.name=run", "optimizer.average=0.5",
    ]  # fmt: skip
    done = programs.run("-m", "shoal", "train", *words, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/run/events.jsonl").open()]
    *_, validated = [event for event in events if event["event"] == "validated"]
    assert validated["loss"] == pytest.approx(math.log(512), rel=0.05)
    with safe_open(tmp_path / "runs/run/checkpoints/step-2/rank-0.safetensors", "pt") as file:
        stored = [key for key in list(file.keys()) if key.startswith("model.")]
        weights = {key.removeprefix("model."): file.get_tensor(key) for key in stored}
    assert "model.layers.0.self_attn.q_proj.weight" in weights
    (tmp_path / "tiny").rename(tmp_path / "gone")  # the run's own folder is enough
    sampled = ("sample", "runs/run", "--prompt", "The layout", "--tokens", "20")
    text = shoal(*sampled, "--seed", "2")
    likeliest = shoal(*sampled, "--temperature", "0")
    far = shoal("sample", "runs/run", "--prompt", "The layout", "--tokens", "70")  # > 64 positions
    assert len({text, likeliest, far}) == 3
    told = shoal("checkpoint", "export", "runs/run", "out")
    assert told.endswith("model.safetensors, tokenizer.json, tokenizer_config.json"), "and no more"
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        "out", output_loading_info=True
    )
    assert not any(loading.values())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.config.use_cache, "off for training alone"
    assert (model.generation_config.eos_token_id, model.generation_config.top_k) == (0, 40)
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    begun = tokenizer("The layout", return_tensors="pt")
    torch.manual_seed(2)
    drawn = model.generate(**begun, max_new_tokens=20, do_sample=True, temperature=0.7)
    greedy = model.generate(**begun, max_new_tokens=20, do_sample=False)
    decoded = [tokenizer.decode(ids[0], skip_special_tokens=True) for ids in (drawn, greedy)]
    assert decoded == [text, likeliest]
    shoal("checkpoint", "export", "runs/run", "averaged", "--average")
    averaged = transformers.AutoModelForCausalLM.from_pretrained("averaged").state_dict()
    assert not torch.equal(averaged["lm_head.weight"], weights["lm_head.weight"])
