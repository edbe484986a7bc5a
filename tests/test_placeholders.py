"""A command in a message can be pasted: it names the folder or file that the program knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shoal"
WORD = re.compile(r"\b(?:RUN|FOLDER|FILE|NAME|PATH|OTHER_FILE)\b")
COMMAND = re.compile(rf"(?:\bshoal [a-z]+|--resume|--record|--against)\b[^;,`]*?{WORD.pattern}")
CHOSEN = {
    "cli/data.py": "no run folder was named",
    "cli/replay_run.py": "no run was named",
    "cli/runs.py": "no folder was named",
    "cli/trace.py": "no run was named",
    "cli/train.py": "no run was named",
    "cli/usage_errors.py": "no run was named",
    "cli/island_key.py": "a folder where the user may write",
    "replay/step_marks.py": "the run of another machine",
}
"""File → why its messages have a word in the place of a name that the user chooses."""


def messages(tree: ast.AST) -> Iterator[str]:
    """Texts of a module that no docstring and no help of a command has; {} stands for a value."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg in ("help", "metavar", "words"):
            skipped |= {id(one) for one in ast.walk(node.value)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(one) for one in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
            yield "".join(map(str, parts))


def test_a_command_in_a_message_names_what_the_program_knows() -> None:
    sources = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    found = {
        str(path.relative_to(SOURCE)): text
        for path, source in sources.items()
        if WORD.search(source)
        for text in messages(ast.parse(source))
        if COMMAND.search(text)
    }
    assert {place: text for place, text in found.items() if place not in CHOSEN} == {}
    assert found.keys() == CHOSEN.keys()
