"""What a run.toml means for a start: pretrained weights, lengths, keys of another section, differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.ending import next_lines
from shoal.config.differences import compare_configurations
from shoal.config.load import load_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as transformers saves it; its files are only looked for."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def loaded(model: Path, *more: str, source: str = "jsonl:chats.jsonl") -> tuple[str, str]:
    """The tokenizer, and the notices."""
    found = load_config(None, [f"model.name=hf:{model}", f"data.source={source}", *more])
    return found.config.data.tokenizer, "\n".join(found.notices)


@pytest.mark.parametrize("source", ["jsonl:chats.jsonl", "stdlib", "text:*.md", "mix:1*stdlib"])
def test_the_folders_own_tokenizer_is_the_default(model: Path, source: str) -> None:
    own = str(model / "tokenizer.json")
    assert loaded(model, source=source) == (
        own,
        f"data.tokenizer = {own}: the one of the weights in {model}",
    )


def test_an_index_of_several_files_are_weights_too(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.safetensors.index.json")
    assert loaded(model)[0] == str(model / "tokenizer.json")


def test_a_tokenizer_that_is_given_stays_with_a_line(model: Path) -> None:
    spec, told = loaded(model, "data.tokenizer=bpe:512")
    assert spec == "bpe:512"
    assert told.endswith(
        f"the weights in {model} know other ids; try: data.tokenizer={model}/tokenizer.json"
    )
    assert loaded(model, "data.tokenizer=mine.json") == ("mine.json", "")


def test_a_folder_without_a_tokenizer_gets_a_line(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    spec, told = loaded(model)
    assert spec == "bpe:2048"
    assert "try: data.tokenizer=the tokenizer.json of that model" in told


def test_new_weights_and_other_data_keep_the_default(model: Path) -> None:
    assert loaded(model, source="tokens:somewhere") == ("bpe:2048", "")
    assert loaded(model / "config.json") == ("bpe:2048", "")
    (model / "model.safetensors").unlink()
    assert loaded(model) == ("bpe:2048", "")


def test_the_length_of_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nepochs = 10\n")
    found = load_config(tmp_path / "run.toml", ["train.steps=300"])
    assert (found.config.train.steps, found.config.train.epochs) == (300, 0)
    assert found.notices == ["train.steps = 300: takes the place of train.epochs = 10 in the file"]
    (tmp_path / "run.toml").write_text("[train]\nsteps = 10\n")
    train = load_config(tmp_path / "run.toml", ["train.epochs=3"]).config.train
    assert (train.steps, train.epochs) == (0, 3)


def test_a_key_of_another_section_is_named_there() -> None:
    with pytest.raises(ConfigError, match=r"train.recompute: no such key; try: memory.recompute"):
        load_config(None, ["train.recompute=none"])


def test_a_number_that_shoal_chose_is_no_difference() -> None:
    texts = [f'[train]\nvalidate_samples = "{n}"\nepochs = 3\n' for n in ("auto", "64", "32")]
    assert compare_configurations(texts[0], texts[1]) == []
    assert compare_configurations(texts[1], texts[0]) == []
    assert [one.key for one in compare_configurations(*texts[1:])] == ["train.validate_samples"]


@pytest.mark.parametrize(("length", "key"), [("steps = 5", "steps"), ("epochs = 3", "epochs")])
def test_the_next_line_lengthens_by_the_runs_own_unit(
    tmp_path: Path, length: str, key: str
) -> None:
    (tmp_path / "run.toml").write_text(f"[train]\n{length}\n")
    assert next_lines(tmp_path, 0, "completed", 5).endswith(f" train.{key}=N")
    (tmp_path / "run.toml").write_text("[train\n")
    assert next_lines(tmp_path, 0, "completed", 5).endswith(" train.steps=N")


def test_an_island_takes_over_a_checkpoint_of_one_with_another_key() -> None:
    """Its own key, its address and how long it waits are no part of the result."""
    then = '[islands]\nleast = 2\nkey = "0.key"\nkeys = "a.pub"\nwait_s = 600.0\n'
    now = '[islands]\nleast = 2\nkey = "1.key"\nkeys = "b.pub"\nwait_s = 60.0\n'
    (found,) = compare_configurations(then, now)
    assert (found.key, found.changes) == ("islands.wait_s", False)
