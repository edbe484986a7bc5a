"""`shoal data look`: its rows are the model's inputs, and what it prints of them and of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import start
from shoal.cli.main import app
from shoal.fabric import start_world
from shoal.trainer import main_job

SPY = """
import torch
SEEN = []
class Spy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 4)
        self.head = torch.nn.Linear(4, 300)
    def forward(self, input_ids, position_ids=None):
        if self.training and torch.is_grad_enabled():
            SEEN.append((input_ids.tolist(), None if position_ids is None else position_ids.tolist()))
        hidden = self.embedding(input_ids)
        if position_ids is not None:
            hidden = hidden + position_ids[..., None] * 1e-3
        return self.head(hidden)
def build():
    return Spy()
"""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ate", "fish", "while", "birds", "sang")


def sentence(number: int, words: int) -> str:
    """Words that follow from a number."""
    return " ".join(WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(words))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with texts, chats, and runs of three steps on them with a spy as the model."""
    folder = tmp_path_factory.mktemp("look")
    for name in "ab":
        lines = [f"{name}{n}: {sentence(n, 9)}\n" for n in range(60)]
        (folder / f"{name}.txt").write_text("".join(lines))
    rows = []
    for n in range(40):
        turns = [("user", sentence(n, 3)), ("assistant", sentence(n + 1, 2 + n % 5) + " é")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "look_spy.py").write_text(SPY)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.setattr(main_job, "measure_machine", lambda *_: None)
    yield folder
    patch.undo()
    sys.modules.pop("look_spy", None)


def train(name: str, *words: str) -> list[tuple[Any, Any]]:
    """Train three steps in this process; return the inputs of each forward pass of training."""
    settings = ["model.build=look_spy:build", "train.steps=3", "train.batch=8", f"run.name={name}",
                "train.micro_batch=4", "data.sequence=24", "data.tokenizer=bpe:300",
                "data.validation=0", "train.prove=off", "train.guards=off", "checkpoint.every=2", *words]  # fmt: skip
    prepared = start.prepare_run(settings, None, 1)
    prepared.folder.mkdir(parents=True)
    start.write_run_folder(prepared)
    import look_spy

    look_spy.SEEN.clear()
    assert main_job.train(prepared.folder, lambda *_: "", world=start_world({})) == 0
    return list(look_spy.SEEN)


def answer(*words: str) -> str:
    """What `shoal data look` prints; it must end well."""
    done = CliRunner().invoke(app, ["data", "look", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


SOURCES = {
    "text": ["data.source=text:a.txt"],
    "chat": ["data.source=jsonl:chat.jsonl"],
    "packed": ["data.source=jsonl:chat.jsonl", "data.packing=on"],
    "mixed": ["data.source=mix:0.7*text:a.txt+0.3*text:b.txt"],
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_what_the_model_got(here: Path, name: str) -> None:
    """Token by token, in order, with the positions of packed rows."""
    seen = train(name, *SOURCES[name])
    rows = []
    for step in (1, 2, 3):
        document = json.loads(answer(f"runs/{name}", "--step", str(step), "--json"))
        assert len(document["rows"]) == 8
        rows += document["rows"]
    got = [row for ids, _ in seen for row in ids]
    assert [row["input_ids"] for row in rows] == got
    if name == "packed":
        places = [row for _, positions in seen for row in positions]
        assert [row["position_ids"] for row in rows] == places
        assert any(row["documents"] > 1 for row in rows)
