"""`shoal sample` and `export` on runs that they cannot serve: one line each, by its text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.save.write import Piece, save
from shoal.cli.main import app
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.models.catalog import build
from shoal.trainer.run_folder.hub_files import write_hub_tokenizer

TEXT = "[model]\nname = 'gpt'\ndim = 8\nheads = 2\nlayers = 1\n[data]\nsource = 'stdlib'\nsequence = 4\n"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_folder(
    toml: str, *, tokenizer: bool = True, model: str = "gpt", tag: str = "", average: bool = False
) -> Path:
    """A run of two words, as `shoal train` leaves it after a step; `average` holds zeros."""
    folder = Path("runs/mine")
    folder.mkdir(parents=True, exist_ok=True)
    if toml:
        (folder / "run.toml").write_text(toml)
    if tokenizer:
        words = {"a": 0, "b": 1, "c": 2}
        write_hub_tokenizer(Tokenizer(models.WordLevel(words, unk_token="a")), "bpe:512", folder)
    torch.manual_seed(0)
    arguments = {"dim": 8, "heads": 2, "layers": 1, "vocabulary": 3, "sequence": 4}
    state = build(model, arguments).state_dict()
    state.pop("head.weight")  # tied
    pieces = [
        Piece(Shard.whole(f"model.{name}", tuple(tensor.shape), "float32"), tensor)
        for name, tensor in state.items()
    ]
    if average:
        pieces += [
            Piece(Shard.whole(f"average.{name}", tuple(tensor.shape), "float32"), 0 * tensor)
            for name, tensor in state.items()
        ]
    ties = {"model.head.weight": "model.embedding.weight"}
    save(
        folder / tag / "checkpoints", 1, pieces, {}, World(ProcessInfo(), torch.device("cpu"), None), lambda *_, **__: None, keep=1,
        aliases=ties,
    )  # fmt: skip
    return folder


def said(*words: str) -> str:
    """The one line of a command that is refused."""
    done = CliRunner().invoke(app, words)
    failure = done.exception
    assert getattr(failure, "exit_code", None) == 2, (done.output, failure)
    assert "\n" not in str(failure)
    return str(failure)


def test_a_run_without_a_checkpoint() -> None:
    Path("runs/mine").mkdir(parents=True)
    assert said("sample", "runs/mine", "--prompt", "a") == (
        "runs/mine: no run folder; try: shoal runs"
    )


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("", "runs/mine: has no run.toml, so it is no run of `shoal train`, and nothing here builds "
             "its model; try: shoal checkpoint export runs/mine mine-exported"),
        ("[data]\nsource = 'digits'\n[model]\nname = 'mlp'\n",
         "runs/mine: trained on digits, which is not text; `shoal sample` is for "
         "data.source=stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB and hf:FOLDER"),
        ("[data]\nsource = 'my.data:make'\n[model]\nname = 'mlp'\n",
         "runs/mine: trained on my.data:make, which is not text; `shoal sample` is for "
         "data.source=stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB and hf:FOLDER"),
        ("[data]\nsource = 'tokens:some'\n",
         "runs/mine: trained on tokens:some, tokens whose tokenizer is not known here; try: "
         "shoal checkpoint export runs/mine mine-exported"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_on_text(toml: str, line: str) -> None:
    run_folder(toml)
    assert said("sample", "runs/mine", "--prompt", "a") == line


def test_a_run_without_a_tokenizer() -> None:
    folder = run_folder(TEXT, tokenizer=False)
    assert said("sample", "runs/mine", "--prompt", "a") == (
        "runs/mine: keeps no hub/tokenizer.json, as runs of an earlier Shoal; it is written by "
        "`shoal train --resume runs/mine`"
    )
    (folder / "hub").mkdir()
    (folder / "hub" / "tokenizer.json").write_text("{")
    assert "runs/mine/hub/tokenizer.json: is no tokenizer: " in said(
        "sample", "runs/mine", "--prompt", "a"
    )


def test_a_prompt_without_tokens_and_a_checkpoint_of_another_model() -> None:
    folder = run_folder(TEXT)
    assert said("sample", "runs/mine", "--prompt", "") == (
        "--prompt: is empty, and there is nothing to go on from; try: 'The'"
    )
    (folder / "run.toml").write_text(TEXT.replace("layers = 1", "layers = 2"))
    assert said("sample", "runs/mine", "--prompt", "a").endswith(
        "step-1: blocks.1.attention.out.bias is not as in the model that run.toml describes; "
        "compare [model] with that of the run that saved it"
    )


def test_one_of_ours_writes_on_and_says_that_no_configuration_is_known() -> None:
    run_folder(TEXT)
    done = CliRunner().invoke(app, ["sample", "runs/mine", "--prompt", "b", "--tokens", "9"])
    assert done.exit_code == 0, done.output
    words = done.stdout.split()
    assert words[0] == "b"
    assert len(words) == 10, "more than the 4 that it sees at once"
    assert {*words} <= {"a", "b", "c"}
    done = CliRunner().invoke(app, ["checkpoint", "export", "runs/mine", "out"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].endswith("; model.safetensors, tokenizer.json, tokenizer_config.json")
    assert lines[1:] == [
        "no config.json: the run keeps none in hub/, as its model is none of transformers (or was "
        "saved by an earlier Shoal); the weights have the names of its own module"
    ]


def test_a_chat_is_asked_as_its_data_were() -> None:
    """The plain form, as the tokenizer has no template; given is the answer alone."""
    run_folder(TEXT.replace("stdlib", "jsonl:chats.jsonl"))
    given = ["--tokens", "9", "--seed", "3"]
    question = "user: b\nassistant:"
    whole, answer = (
        CliRunner().invoke(app, ["sample", "runs/mine", "--prompt", *words, *given])
        for words in ((question,), ("b", "--chat"))
    )
    assert whole.exit_code == answer.exit_code == 0, (whole.output, answer.output)
    assert whole.stdout.split()[-9:] == answer.stdout.split()
    assert len(whole.stdout.split()) > 9


def test_the_average_writes_on() -> None:
    """Of zeros every token is as likely, and the first is taken: the weights take another."""
    run_folder(TEXT, average=True)
    given = ["sample", "runs/mine", "--prompt", "b", "--tokens", "3", "--temperature", "0"]
    stepped, averaged = (CliRunner().invoke(app, [*given, *more]) for more in ((), ("--average",)))
    assert stepped.exit_code == averaged.exit_code == 0, (stepped.output, averaged.output)
    assert averaged.stdout == "b a a a\n"
    assert stepped.stdout != averaged.stdout


def test_checkpoints_of_tags_are_seen() -> None:
    """`list` and `verify` take those of tags along, `export` names one, with the run's tokenizer."""
    run_folder(TEXT, tag="tags/best")
    listed = CliRunner().invoke(app, ["checkpoint", "list", "runs/mine"])
    (line,) = listed.stdout.splitlines()
    assert line.startswith("runs/mine/tags/best/checkpoints/step-1  step 1  ")
    assert said("checkpoint", "export", "runs/mine", "out") == (
        "runs/mine: no complete checkpoint there; try: runs/mine/tags/best"
    )
    done = CliRunner().invoke(app, ["checkpoint", "export", "runs/mine/tags/best", "out"])
    assert done.exit_code == 0, done.output
    assert {"tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in Path("out").iterdir()
    }
    done = CliRunner().invoke(
        app, ["sample", "runs/mine/tags/best", "--prompt", "b", "--tokens", "1"]
    )
    assert done.exit_code == 0, done.output
    run_folder(TEXT)
    listed = CliRunner().invoke(app, ["checkpoint", "list", "runs/mine"])
    places = [line.partition("  ")[0] for line in listed.stdout.splitlines()]
    tagged = "runs/mine/tags/best/checkpoints/step-1"
    assert places == ["runs/mine/checkpoints/step-1", tagged]
    shard = Path(tagged) / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["checkpoint", "verify", "runs/mine"])
    assert done.exit_code == 2
    assert "runs/mine/checkpoints/step-1: every byte is as it was written" in done.stdout
    assert f"{tagged}/rank-0.safetensors: has " in done.stdout


def test_averages_that_are_not_there() -> None:
    run_folder(TEXT)
    assert said("sample", "runs/mine", "--prompt", "b", "--average") == (
        "checkpoints/step-1: holds no averaged weights, which a run keeps where optimizer.average "
        "(average= of parallelize) is above 0; try: the same without --average"
    )
    assert said("checkpoint", "export", "runs/mine", "out", "--average") == (
        "checkpoints/step-1: holds no averaged weights, which a run keeps where optimizer.average "
        "(average= of parallelize) is above 0; try: the same without --average"
    )
    assert not Path("out").exists()


def listed(*words: str) -> list[str]:
    """Lines of `shoal checkpoint list`."""
    done = CliRunner().invoke(app, ["checkpoint", "list", "runs/mine", *words])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_list_of_checkpoints_says_when_each_was_saved_and_how_far_the_newest_is_behind() -> None:
    folder = run_folder(TEXT)
    events = [{"event": "checkpoint_saved", "step": 1, "time_s": at_s} for at_s in (9e8, 1e9)]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (line,) = listed()
    assert line.endswith(time.strftime("  saved %m-%d %H:%M:%S", time.localtime(1e9)))
    assert json.loads("".join(listed("--json")))[0]["saved_s"] == 1e9
    for steps, count in ((2, "1 step"), (8, "7 steps")):
        (folder / "metrics.jsonl").write_text(f'{{"step": {steps}}}\n')
        assert listed()[-1] == f"the newest is {count} behind the last step ({steps})"
    (folder / "events.jsonl").unlink()
    manifest = folder / "checkpoints" / "step-1" / "manifest.json"
    assert json.loads("".join(listed("--json")))[0]["saved_s"] == manifest.stat().st_mtime
