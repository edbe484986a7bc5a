"""Divide a source file into blocks: the runs of statements that are executed together.

A block begins at the entry of a function, of a branch, of a loop, of an exception's handler, and
behind an `if` that leaves. `touch_hook.py` marks the blocks that a test executes; `tests/affected.py`
finds the blocks that a change lies in. Both divide by this module, so they agree.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Named = ast.FunctionDef | ast.AsyncFunctionDef
LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


@dataclasses.dataclass
class Function:
    """One function: its blocks, and the lines of the file that belong to each of them.

    name     qualified as Python does it, "Run.step" or "outer.<locals>.inner"
    blocks   first statement of each block; block 0 is the function's entry
    lines    line number → block, for lines of this function and of no function inside it
    digest   of its text without docstring, comments, blank lines: equal ones have the same blocks
    """

    name: str
    blocks: list[list[ast.stmt]]
    lines: dict[int, int]
    digest: str


def source_files() -> list[Path]:
    """Return the Python files whose blocks are marked: the package, and what tests share."""
    found = (ROOT / "src" / "shoal").rglob("*.py")
    helpers = (p for p in (ROOT / "tests").rglob("*.py") if not p.name.startswith("test_"))
    apart = {ROOT / "tests" / one for one in ("touch", "proof")}
    return sorted([*found, *(p for p in helpers if not apart & set(p.parents))])


def divide(tree: ast.Module, text: str) -> list[Function]:
    """Return the functions of a file, outer ones before inner ones, in the order of the file."""
    lines = text.splitlines()
    found: list[Function] = []

    def into(body: list[ast.stmt], outer: str) -> None:
        for node in body:
            for one in _definitions(node):
                inner = f"{outer}{one.name}"
                if isinstance(one, ast.ClassDef):
                    into(one.body, f"{inner}.")
                else:
                    found.append(_function(one, inner, lines))
                    into(one.body, f"{inner}.<locals>.")

    into(tree.body, "")
    seen: dict[str, int] = {}
    for one in found:  # overloads, setters: a number behind the name
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            one.name += f"#{seen[one.name]}"
    return found


def _definitions(node: ast.stmt) -> Iterator[Named | ast.ClassDef]:
    """Yield the definitions in a statement that no other definition of it holds."""
    if isinstance(node, Named | ast.ClassDef):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _definitions(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            for one in child.body:
                yield from _definitions(one)


def _function(node: Named, name: str, text: list[str]) -> Function:
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    last = node.end_lineno or node.lineno
    has_docstring = ast.get_docstring(node, clean=False) is not None
    said = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1) if has_docstring else ()
    kept = [text[line - 1] for line in range(first, last + 1) if line not in said]
    one = Function(name, [], {}, _digest(kept))
    for line in range(first, last + 1):
        one.lines[line] = 0
    _block(node.body[1:] if has_docstring and len(node.body) > 1 else node.body, one)
    for inner in (n for stmt in node.body for n in _definitions(stmt)):
        begin = min([inner.lineno, *(d.lineno for d in inner.decorator_list)])
        for line in range(begin, (inner.end_lineno or inner.lineno) + 1):
            one.lines.pop(line, None)
    return one


def _block(body: list[ast.stmt], function: Function) -> None:
    """Add a block that begins with a body, and the blocks inside it."""
    number = len(function.blocks)
    function.blocks.append(body)
    for at, node in enumerate(body):
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            function.lines[line] = number
        if isinstance(node, Named | ast.ClassDef):
            continue
        _branches(node, function, number)
        if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES) and body[at + 1 :]:
            _block(body[at + 1 :], function)
            return


def _branches(node: ast.stmt, function: Function, number: int) -> None:
    """Add the blocks inside a compound statement; `with` and `try` go on in the block around."""
    if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While):
        for body in filter(None, (node.body, node.orelse)):
            _block(body, function)
    elif isinstance(node, ast.With | ast.AsyncWith):
        _inside(node.body, function, number)
    elif isinstance(node, ast.Try | ast.TryStar):
        _inside(node.body, function, number)
        for handler in node.handlers:
            for line in range(handler.lineno, handler.body[0].lineno):
                function.lines[line] = len(function.blocks)
            _block(handler.body, function)
        if node.orelse:
            _block(node.orelse, function)
        _inside(node.finalbody, function, number)
    elif isinstance(node, ast.Match):
        for case in node.cases:
            _block(case.body, function)


def _inside(body: list[ast.stmt], function: Function, number: int) -> None:
    """Go through a body that runs whenever what is around it runs."""
    for at, node in enumerate(body):
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            function.lines[line] = number
        if not isinstance(node, Named | ast.ClassDef):
            _branches(node, function, number)
        if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES) and body[at + 1 :]:
            _block(body[at + 1 :], function)
            return


def _digest(lines: list[str]) -> str:
    text = "\n".join(line.strip() for line in lines if not re.match(r"\s*(#|$)", line))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def read(path: Path) -> tuple[ast.Module, str]:
    """Return a file's tree and text."""
    with tokenize.open(path) as file:
        text = file.read()
    return ast.parse(text), text


def mark(tree: ast.Module, functions: list[Function], statement: Callable[[int], ast.stmt]) -> None:
    """Insert a statement at the beginning of each block, in the tree that `divide` has divided.

    Args:
        tree: it is changed.
        functions: the tree's own.
        statement: the statement for the n-th block of the file, counted over its functions.
    """
    number = 0
    befores: dict[int, ast.stmt] = {}
    for function in functions:
        for body in function.blocks:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                number += 1  # a docstring alone: nothing runs
                continue
            made = ast.copy_location(statement(number), first)
            befores[id(first)] = ast.fix_missing_locations(made)
            number += 1

    class Insert(ast.NodeTransformer):
        """Puts each statement before the one that it belongs to."""

        def generic_visit(self, node: ast.AST) -> ast.AST:
            super().generic_visit(node)
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, list(_before(body, befores)))
            return node

    Insert().visit(tree)


def _before(body: list[ast.stmt], befores: dict[int, ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if id(node) in befores:
            yield befores[id(node)]
        yield node
