"""No text of the proof names a file, class or function of Shoal: its readers train models.

Every string in src/shoal/proof counts, docstrings aside, whether or not it reaches a user.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.config.sections import Config, keys
from shoal.proof.diagnosis.clue import REPORT
from shoal.proof.start_proof import format_refusal

SOURCE = Path(__file__).parent.parent / "src" / "shoal"
FILES = sorted((SOURCE / "proof").glob("*.py"))
KEYS = {
    f"{section.name}.{key.name}"
    for section in fields(Config)
    for key in keys(getattr(Config(), section.name))
}
PUBLIC = {"shoal.parallelize", "run.toml", "proof.json", "proofs.json"}
PATTERN = "*.py"
"""Finds all sources, to hash them; it is no text."""

TEXTS = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
CLASSES, FUNCTIONS = (
    {name for text in TEXTS.values() for name in re.findall(pattern, text, re.MULTILINE)}
    for pattern in (r"^ *class (\w+)[(:]", r"^ *def (\w+)\(")
)
MODULES = {path.stem if path.stem != "__init__" else path.parent.name for path in TEXTS}


def strings(tree: ast.AST) -> list[str]:
    """Every constant string of a file, parts of f-strings too; docstrings are left out."""
    said = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


def names_of_ours(text: str) -> list[str]:
    """Files, dotted names and classes of Shoal in a text; public names and keys are none."""
    found = re.findall(r"\S*\.py\b\S*", text) if text != PATTERN else []
    for name in re.findall(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", text):
        first, *_, last = name.split(".")
        ours = first in MODULES | CLASSES or last in CLASSES | FUNCTIONS
        if ours and first != "torch" and name not in KEYS | PUBLIC:
            found.append(name)
    words = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*\b", text)) - {"BatchNorm"}
    return found + sorted(words & CLASSES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_text_names_what_is_inside(path: Path) -> None:
    for text in strings(ast.parse(TEXTS[path])):
        assert not names_of_ours(text), text


@pytest.mark.parametrize(
    "text",
    [
        "look at trainer/step/optimizer_step.py (update)",
        "what is summed over stages (Placement.sum_over)",
        "the backward pass of autograd_collectives.enter",
        "which rank's loss counts (Program.speaks)",
        "the label of a BlockSplit",
    ],
)
def test_a_name_of_ours_is_seen(text: str) -> None:
    assert names_of_ours(text)


@pytest.mark.parametrize(
    "text",
    [
        "try: layout.tp=1, or layout.dp_shard=1",
        "build the optimizer after shoal.parallelize",
        "report it with proof.json (shoal prove run.toml --json > proof.json)",
        "keep statistics in torch.nn.BatchNorm layers",
        "only what trains, [p for p in parameters if p.requires_grad]",
        "lost. Likely cause: x",
    ],
)
def test_what_users_know_is_none(text: str) -> None:
    assert not names_of_ours(text)


@pytest.mark.parametrize(
    ("alone", "report", "whole"),
    [
        ("shoal prove -- SCRIPT", "shoal prove --json -- SCRIPT", "`shoal prove -- SCRIPT`"),
        ("shoal prove --quick runs/a/run.toml", "shoal prove run.toml --json", "`shoal prove`"),
    ],
)
def test_a_refusal_names_the_command_that_fits_the_loop(
    alone: str, report: str, whole: str
) -> None:
    told = {"layout": "ddp", "processes": 2, "said": [], "cause": {"text": REPORT}}
    line = format_refusal(told, "train.prove=off", alone)
    assert f"({report} > proof.json)" in line
    assert f"{whole} shows every parameter" in line
