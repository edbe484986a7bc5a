"""What [tune] cannot do is refused before anything is built, in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.start import check_tune
from shoal.config.load import load_config


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("tune.rank=4", "tune.rank = 4: no adapter is asked for; try: tune.adapter=lora"),
        ("tune.targets=a,b", "tune.targets = a,b: no adapter is asked for"),
        ("tune.adapter=qlora", "tune.adapter = qlora: not one of none, lora, dora; try: lora"),
        ("tune.adapter=lora tune.rank=0", "tune.rank = 0: at least 1 is wanted"),
        ("tune.adapter=lora tune.dropout=1", "tune.dropout = 1.0: less than 1 is wanted"),
        (
            "tune.adapter=dora",
            "tune.adapter = dora: model.name = llama starts from random weights, and frozen ones "
            "learn nothing; try: model.name=hf:FOLDER",
        ),
        (
            "tune.adapter=lora model.name=hf:base",
            "tune.adapter = lora: no safetensors lie beside base/config.json",
        ),
    ],
)
def test_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, line: str) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError) as refused:
        check_tune(load_config(None, words.split()).config)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs peft.*pip install 'shoal\[tune\]'"):
        check_tune(load_config(None, ["tune.adapter=lora", "model.build=a.b:c"]).config)


def test_a_builder_brings_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_tune(load_config(None, ["tune.adapter=lora", "model.build=a.b:c"]).config)
