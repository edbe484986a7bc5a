"""Keys of run.toml in a message, as the arguments that a training loop of the user's own has.

    train.compile = blocks: …       compile = blocks: …
    try: train.micro_batch=4        try: micro_batch=4
    try: layout.strategy=ddp        try: layout="ddp"
    try: layout.tp=2                try: layout={"tp": 2}
    data.source: sample 7 …         dataset: sample 7 …

Messages name the keys of run.toml, which `shoal train` reads. A loop of the user's own has no such
file: its messages pass through here before anybody sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.base.errors import ShoalError
from shoal.base.layouts.policies import POLICIES

SECTIONS = ("train", "memory", "precision", "fsdp", "layout", "optimizer", "checkpoint", "data")
"""Sections with policies; each key of them is an argument of its own name."""
SETTING = re.compile(
    rf"(?<![\w./])(?P<section>{'|'.join((*SECTIONS, 'model', 'run', 'launch'))})\.(?P<key>[a-z_]+)"
    r"(?![\w(]|\.\w)(?:=(?P<value>[^\s,;()'\"]*[\w…*]))?"
)
"""A key, and behind `=` its value. `run.step(…)` is a call, `model.layers.0` is a module."""
ASIDE = re.compile(rf" \(({SETTING.pattern})\)")
JOINED = re.compile(r"\},? layout=\{")
"""Between two degrees of one suggestion."""

ARGUMENTS: Mapping[str, str] = {
    "train.batch": "batch",
    "train.micro_batch": "micro_batch",
    "train.accumulate": "micro_batch",
    "train.steps": "total_steps",
    "train.epochs": "run.epochs",
    "precision.compute": "precision",
    "model.loss": "loss",
    "model.call": "call",
    "model.vocabulary": "the model's vocabulary",
    "model.classes": "the model's classes",
    "model.build": "model",
    "data.source": "dataset",
    "data.validation": "the dataset of run.evaluate",
    "data.collate": "collate",
    "data.workers": "workers",
    "data.tokenizer": "tokenizer",
    "data.sequence": "sequence",
    "data.packing": "packing",
    "data.dtype": "dtype",
    "data.field": "field",
    "data.image_size": "image_size",
    "optimizer.name": "optimizer",
    "optimizer.lr": "the optimizer's lr",
    "optimizer.betas": "the optimizer's betas",
    "optimizer.momentum": "the optimizer's momentum",
    "optimizer.weight_decay": "the optimizer's weight_decay",
    "optimizer.schedule": "schedule",
    "optimizer.warmup_steps": "warmup_steps of schedule",
    "run.folder": "folder",
    "run.name": "folder",
    "layout.strategy": "layout",
    "launch.processes": "processes",
}
"""Keys whose names differ from their arguments', or that are no policy, as a message has them."""
OF_OPEN_DATA = {**ARGUMENTS, "data.source": "source", "data.validation": "validation"}
"""The same in messages of `open_data`."""

SETTINGS: Mapping[str, str] = {
    "data.workers": "run.loader(…, workers={})",
    "data.collate": "run.loader(…, collate=function)",
    "data.packing": 'open_data(…, packing="{}")',
    "model.loss": "loss=function",
    "train.epochs": "run.epochs({})",
    "train.accumulate": "a smaller micro_batch",
    "optimizer.lr": "a smaller learning rate",
    "run.name": 'folder="runs/…"',
    "run.folder": 'folder="…"',
    "launch.processes": "{} processes",
}
"""Keys of a suggested `key=value` that code sets otherwise; `{}` is the value."""

OPTIMIZERS = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD", "muon": "torch.optim.Muon"}


def argument_setting(key: str, value: str, names: Mapping[str, str] = ARGUMENTS) -> str | None:
    """Return a suggested `key=value` of run.toml as code has it; None for no setting of a loop.

    >>> argument_setting("train.spikes", "skip"), argument_setting("layout.tp", "2")
    ('spikes="skip"', 'layout={"tp": 2}')
    >>> argument_setting("optimizer.name", "adamw"), argument_setting("tune.rank", "8")
    ('torch.optim.AdamW', None)
    """
    if key in SETTINGS:
        return SETTINGS[key].format(value)
    if key == "optimizer.name":
        return OPTIMIZERS.get(value, value)
    text = value if re.fullmatch(r"-?[\d.]+|…", value) else f'"{value}"'
    section, _, name = key.partition(".")
    if section == "layout" and name not in POLICIES and name != "strategy":
        return f'layout={{"{name}": {text}}}'
    found = _argument(key, names)
    return f"{found}={_literal(found, value, text)}" if found and found.isidentifier() else None


def _literal(name: str, value: str, text: str) -> str:
    """Return a value as Python has it; keys of run.toml have true and false."""
    if name in POLICIES and isinstance(POLICIES[name].default, bool):
        return value.capitalize()
    return text


def _argument(key: str, names: Mapping[str, str]) -> str | None:
    """Return the argument of a key; None for a key that no loop of the user's own has."""
    section, _, name = key.partition(".")
    if key in names:
        return names[key]
    return name if name in POLICIES and section in SECTIONS else None


def use_argument_names(text: str, names: Mapping[str, str] = ARGUMENTS) -> str:
    """Return a message with the arguments of `shoal.parallelize` in the place of keys.

    Args:
        text: the message.
        names: key → argument, as far as these differ.

    >>> use_argument_names("train.compile = blocks: none; try: train.compile=none")
    'compile = blocks: none; try: compile="none"'
    >>> use_argument_names("run.step: model.layers.0 is data.source of train.py")
    'run.step: model.layers.0 is dataset of train.py'
    >>> use_argument_names("try: a larger micro_batch (train.micro_batch); 5 (train.skip_limit)")
    'try: a larger micro_batch; 5 (skip_limit)'
    """

    def drop(aside: re.Match[str]) -> str:
        name = _argument(f"{aside['section']}.{aside['key']}", names)
        return "" if name and re.search(rf"\b{name}\b", text[: aside.start()]) else aside[0]

    def replace(found: re.Match[str]) -> str:
        key, value = f"{found['section']}.{found['key']}", found["value"]
        told = argument_setting(key, value, names) if value else _argument(key, names)
        return told or found[0]

    if "." not in text:
        return text
    return JOINED.sub(", ", SETTING.sub(replace, ASIDE.sub(drop, text)))


def rename_error(error: BaseException, names: Mapping[str, str] = ARGUMENTS) -> None:
    """Give the message of a ShoalError the names of arguments, in place; others stay as they are.

    Args:
        error: any exception.
        names: as in `use_argument_names`.
    """
    if isinstance(error, ShoalError) and error.args and isinstance(error.args[0], str):
        error.args = (use_argument_names(error.args[0], names), *error.args[1:])
