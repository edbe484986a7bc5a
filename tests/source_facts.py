"""Facts about the files of `src` that several tests ask for, each file parsed once in a session."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "src" / "shoal").rglob("*.py"))


class Definition(NamedTuple):
    """A module, class, function or method."""

    name: str
    first_line: str  # of its docstring
    is_public_class: bool  # at the top of its module


@dataclass(frozen=True)
class Contents:
    """The facts about one file that tests ask for; trees of all files would be too large."""

    lines: int
    logical_lines: int
    imports: tuple[tuple[str, str], ...]  # (module, name) of each `from … import`
    functions: tuple[tuple[str, int], ...]  # (name, lines of code), methods and inner ones too
    undocumented: tuple[str, ...]  # "" for the module, and public names at its top
    without_encoding: tuple[int, ...]  # lines of read_text and write_text without `encoding`
    definitions: tuple[Definition, ...]


@functools.cache
def read_contents(path: Path) -> Contents:
    """Parse a file once for all tests."""
    text = path.read_text()
    tree = ast.parse(text)
    found = list(statements(tree))
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return Contents(
        lines=len(text.splitlines()),
        logical_lines=logical_lines(tree),
        imports=tuple(
            (node.module, alias.name)
            for node in found
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        ),
        functions=tuple(
            (node.name, code_lines(node)) for node in found if isinstance(node, ast.FunctionDef)
        ),
        undocumented=(
            *(() if ast.get_docstring(tree) else ("",)),
            *(node.name for node in public if not ast.get_docstring(node)),
        ),
        without_encoding=tuple(open_ended(tree)) if re.search("(read|write)_text", text) else (),
        definitions=tuple(
            Definition(
                getattr(node, "name", path.stem),
                (ast.get_docstring(node) or "").partition("\n")[0],
                isinstance(node, ast.ClassDef) and node in tree.body and node.name[0] != "_",
            )
            for node in (tree, *found)
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        ),
    )


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node, at any depth, without their expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def open_ended(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that read or write a text file without its encoding."""
    for node in ast.walk(tree):
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        named = any(word.arg == "encoding" for word in getattr(node, "keywords", ()))
        if name in ("read_text", "write_text") and not named:
            yield node.lineno


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def lines_of_code(path: Path) -> int:
    """Return the logical lines of a file.

    >>> lines_of_code(ROOT / "src" / "shoal" / "neighbours" / "__init__.py")
    0
    """
    return read_contents(path).logical_lines


def logical_lines(tree: ast.AST) -> int:
    """Count logical lines: a statement over three lines is one, docstrings are none.

    They are the NEWLINE tokens of the file, which takes twenty times as long to split.

    >>> text = "@a\\ndef f():\\n  if x:\\n    y\\n  elif z:\\n    pass\\n  else:\\n    pass\\n"
    >>> import io, tokenize
    >>> tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    >>> logical_lines(ast.parse(text)), sum(one.type == tokenize.NEWLINE for one in tokens)
    (8, 8)
    """
    count = 0
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        orelse = getattr(node, "orelse", None) or []
        is_elif = isinstance(node, ast.If) and all(
            isinstance(one, ast.If) and one.col_offset == node.col_offset for one in orelse[:1]
        )
        count += 1 + len(getattr(node, "decorator_list", ())) + bool(orelse and not is_elif)
        count += bool(getattr(node, "finalbody", None))
    return count
