"""Messages that a loop of the user's own can reach name its arguments, and no key of run.toml."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import shoal
from shoal.base.errors import ConfigError
from shoal.base.text.argument_names import ARGUMENTS, OF_OPEN_DATA, rename_error, use_argument_names
from shoal.config.sections import Config, keys

SOURCE = Path(shoal.__file__).parent
ROOMS = ("base", "checkpoint", "data", "fabric", "models", "optim", "parallel", "planning", "trace")
OF_SHOAL_TRAIN = (
    *("trainer/jobs/", "trainer/islands/", "trainer/servers/", "trainer/main_job.py"),
    *("fabric/islands/", "fabric/compressed/codecs/__init__.py", "trainer/adapters.py"),
    *("base/layouts/changing_members.py", "base/layouts/trimmed_mean.py", "models/huggingface.py"),
    *("base/layouts/island", "base/text/", "base/validation_size.py", "base/runlog/events.py"),
    *("data/files/image_folders.py", "checkpoint/format/weighted_paths.py"),
)
"""Files of which no message reaches a loop: it has no islands, no [tune], and builds its model."""
SAID = re.compile(r"(?<![\w./])([a-z]+\.[a-z_]+)(?![\w(]|\.\w)")
WORDS = re.compile(r"islands\.(method|count)|data\.validation=(images:)?$")
"""Words of `shoal train` alone, where a message says that its way is another one."""
KEYS = {
    f"{section.name}.{key.name}"
    for section in fields(Config)
    for key in keys(type(getattr(Config(), section.name)))
}


def _texts(path: Path) -> Iterator[str]:
    """The strings of a file without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        is_text = isinstance(one, ast.Constant) and id(one) not in documents
        if is_text and isinstance(one.value, str):
            yield one.value


@pytest.mark.parametrize("room", [*ROOMS, "trainer"])
def test_every_key_in_a_message_has_an_argument(room: str) -> None:
    """Keys of [layout] are those of the argument of that name, and stay."""
    names = OF_OPEN_DATA if room == "data" else ARGUMENTS
    left = {
        (key, str(path.relative_to(SOURCE)))
        for path in (SOURCE / room).rglob("*.py")
        if not str(path.relative_to(SOURCE)).startswith(OF_SHOAL_TRAIN)
        for text in _texts(path)
        for key in SAID.findall(use_argument_names(text, names))
        if key in KEYS and not key.startswith("layout.") and not WORDS.search(text)
    }
    assert not left


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "train.micro_batch = 3: not a divisor; try: train.micro_batch=4",
            "micro_batch = 3: not a divisor; try: micro_batch=4",
        ),
        ("try: layout.tp=2 layout.dp_shard=2", 'try: layout={"tp": 2, "dp_shard": 2}'),
        ("layout.strategy = fspd; try: fsdp", "layout = fspd; try: fsdp"),
        ("try: layout.ep=1, or optimizer.name=adamw", 'try: layout={"ep": 1}, or torch.optim.AdamW'),
        ("give model.loss=pkg.mod:function", "give loss=function"),
        ("set model.vocabulary, or model.classes", "set the model's vocabulary, or the model's classes"),
        ("data.source: sample 7 (epoch 0)", "dataset: sample 7 (epoch 0)"),
        ("try: layout.strict=false, train.trace=3:5", 'try: strict=False, trace="3:5"'),
        ("lower optimizer.lr, or set optimizer.clip", "lower the optimizer's lr, or set clip"),
        ('call="kwargs" (model.call): a dict', 'call="kwargs": a dict'),
        ("5 steps in a row (train.skip_limit)", "5 steps in a row (skip_limit)"),
    ],
)  # fmt: skip
def test_a_message(text: str, told: str) -> None:
    assert use_argument_names(text) == told
    assert use_argument_names(told) == told, "a message may pass twice"


@pytest.mark.parametrize(
    "text",
    [
        "model.layers.0.weight: shape [2]",
        "train.py:12: run.step(batch), data.train of src/model.loss.py",
        "torch.optim.lr, /data.source/x, self.model.loss",
    ],
)
def test_names_of_the_users_stay(text: str) -> None:
    assert use_argument_names(text) == text


def test_an_error_is_renamed_in_place() -> None:
    error = ConfigError("train.batch = 3: no", 7)
    rename_error(error)
    assert error.args == ("batch = 3: no", 7)
    other = ValueError("train.batch = 3")
    rename_error(other)
    assert str(other) == "train.batch = 3"
