"""Every command, key and option that a message, a hint or a page names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.base.errors import ConfigError, PlanError
from shoal.base.layouts.strategies import expand_strategy
from shoal.cli.compare_rows import parse_layout_names
from shoal.cli.main import app
from shoal.config.sections import Config, keys
from shoal.data.sources import Source
from shoal.forecast.models.model_facts import FAMILIES
from shoal.trainer.run import Run

ROOT = Path(__file__).parent.parent.parent
HISTORY = ("decisions", "lab-log.md", "history.md", "proof")
"""Pages of docs/ that tell what was tried, and by what name."""

VERB = re.compile(r"(?<![\w./-])shoal ([a-z][a-z-]*)(?: ([a-z][a-z_-]++)(?![=./]))?")
SECTIONS = "|".join(vars(Config()))
KEY = re.compile(rf"(?<![\w./-])({SECTIONS})\.([a-z_]+)=")
"""A key as a user sets it."""

OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
NOT_VERBS = {"order", "rank", "import"}
"""Words of process names, of a hash and of Python."""

PROSE = {"for"}
"""Words that follow a group of commands and are none."""

OF_OTHERS = {
    *("--cpu", "--multi", "--num", "--nnodes", "--nproc", "--nproc-per-node", "--standalone"),
    *("--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--max-restarts"),
    *("--kill-on-bad-exit", "--ntasks-per-node", "--requeue", "--signal", "--shm-size", "--sort"),
    *("--local-dir", "--repo-type", "--load", "--deepspeed", "--alive", "--node", "--stdin"),
    *("--no-python", "--master-addr", "--master-port", "--node-rank", "--run", "--why"),
    *("--limits", "--against", "--convert-to", "--pty", "--query-gpu", "--format"),
    *("--backend-store-uri", "--logdir"),  # of MLflow and TensorBoard
    *("--script", "--lr"),  # of a worker of `shoal prove`; of a user's script
    *("--tag", "--max", "--safe"),  # of DeepSpeed's zero_to_fp32.py
    *("--index-url", "--only"),  # of pip; of a program under benchmarks/
}
"""Options of torchrun, Slurm, Docker and others; of a worker of `shoal launch`; of our scripts."""


@cache
def commands() -> dict[str, Any]:
    """Every command by its words, such as "checkpoint export", with its typer command."""
    found: dict[str, Any] = {}

    def add(group: Any, words: str) -> None:
        for name, one in group.commands.items():
            found[f"{words}{name}"] = one
            if hasattr(one, "commands"):
                add(one, f"{words}{name} ")

    add(typer.main.get_command(app), "")
    return found


@cache
def texts() -> list[tuple[str, str]]:
    """(place, text) of everything that a user may read."""
    found = []
    files = [*(ROOT / "src" / "shoal").rglob("*.py"), *(ROOT / "src" / "shoal").rglob("*.txt")]
    for path in [*files, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        if not set(path.parts) & set(HISTORY):
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [(f"{path}:{number}", line) for number, line in lines]
    return found


def test_every_command_that_is_named_exists() -> None:
    """`shoal report` did not, which `config import` named."""
    groups = {words.partition(" ")[0] for words in commands() if " " in words}
    named, wrong = set(), []
    for place, text in texts():
        for verb, second in VERB.findall(text):
            if verb in NOT_VERBS:
                continue
            follows = verb in groups and second and second not in PROSE
            called = f"{verb} {second}" if follows else verb
            if called not in commands():
                wrong.append(f"{place}: shoal {called}")
            named.add(called)
    assert not wrong
    assert len(named) > 20, "the pages do name commands"


def test_every_key_that_is_named_exists() -> None:
    known = {f"{name}.{key.name}" for name, part in vars(Config()).items() for key in keys(part)}
    known |= {f"model.{one.name}" for family in FAMILIES.values() for one in family}
    known |= {f"run.{name}" for name in dir(Run)} | {f"data.{name}" for name in dir(Source)}
    named, wrong = set(), []
    for place, text in texts():
        for section, name in KEY.findall(text):
            if f"{section}.{name}" not in known and not is_own_argument(section, text):
                wrong.append(f"{place}: {section}.{name}")
            named.add(f"{section}.{name}")
    assert not wrong
    assert len(named) > 60


def is_own_argument(section: str, text: str) -> bool:
    """Whether it is an argument of a user's own model, of which a page tells."""
    return section == "model" and "model.build" in text


def test_every_option_that_is_named_exists() -> None:
    known = {
        word
        for one in [typer.main.get_command(app), *commands().values()]
        for parameter in one.params
        for word in parameter.opts
    }
    wrong = [
        f"{place}: {option}"
        for place, text in texts()
        for option in OPTION.findall(text)
        if option not in known | OF_OTHERS | {"--help"}
    ]
    assert not wrong


def test_a_method_between_islands_is_not_offered_as_a_strategy() -> None:
    """`scaffold` was in the list of what a wrong name could have meant; naming it is refused."""
    with pytest.raises(PlanError) as caught:
        expand_strategy("scafold", 2)
    assert "scaffold" not in str(caught.value)
    with pytest.raises(PlanError, match="layout.strategy = scaffold: is between islands"):
        expand_strategy("scaffold", 2)
    with pytest.raises(ConfigError) as refused:
        parse_layout_names("scafold")
    assert "scaffold" not in str(refused.value)
