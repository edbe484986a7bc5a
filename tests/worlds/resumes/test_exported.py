"""What runs of divided models export is the model: opened by transformers, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from export_case import wrongs

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "layout"), [("gpt2", "fsdp"), ("llama tied", "tp2"), ("qwen3", "pp2")]
)
def test_an_export_opens_as_the_model_that_was_trained(
    worlds, tmp_path: Path, name: str, layout: str
) -> None:
    told = worlds(2).call("export_case:exported", name=name, layout=layout, folder=str(tmp_path))[0]
    assert wrongs(told) == []
    assert told["whole"]["tied away"] == (["lm_head.weight"] if name != "qwen3" else [])
