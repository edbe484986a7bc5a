"""Weights that a script freezes, and lets train later: their gradients are summed from the start.

    p.requires_grad = True · trunk.requires_grad_() · setattr(p, "requires_grad", flag)

A run sums the gradients of the weights that train when it starts. Weights that are frozen then, and
that the user's source lets train later, are composed as if they trained, and frozen again. What the
source does before it starts the run is over, and lets nothing train later.
"""

from __future__ import annotations

import ast
import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.runlog.environment import find_user_code
from shoal.neighbours.outputs.final_saves import last_name
from shoal.trainer.run import Run

THAWING: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs with weights that may train later."""


@dataclass
class _Scope:
    """A function of the user's source, or the code of a module outside of functions.

    Attributes:
        name: of the function, or of the class that it constructs; "" for a module.
        start: line of its last call that starts a run; 0 without one.
        calls: line and last name of each call.
        thaws: place, line, and whether it always thaws, of each statement that may.
    """

    name: str
    start: int = 0
    calls: list[tuple[int, str]] = field(default_factory=list)
    thaws: list[tuple[str, int, bool]] = field(default_factory=list)


def find_thaw() -> tuple[str, bool]:
    """Return the place in the user's source that lets weights train later, and whether it must.

    It comes after the start of the run in the same function, in a function that is called after it,
    or in one that the source never calls: a library's callback.

    Returns:
        FILE:LINE, "" without one; False if it depends on a value or on who calls it.
    """
    scopes: list[_Scope] = []
    for file, _ in find_user_code().values():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            scopes += _read_scopes(tree, "", Path(file).name)
    starts = [one for one in scopes if one.start]
    reached = {name for one in starts for line, name in one.calls if line > one.start}
    for _ in range(len(scopes)):
        inside = {name for one in scopes if one.name in reached for _, name in one.calls}
        if inside <= reached:
            break
        reached |= inside
    called = {name for one in scopes for _, name in one.calls}
    found = [
        (place, sure and line > one.start > 0)
        for one in scopes
        for place, line, sure in one.thaws
        if (one.start and line > one.start)
        or (one.name and not one.start and (one.name in reached or one.name not in called))
    ]
    return next((one for one in found if one[1]), found[0] if found else ("", False))


def _read_scopes(scope: ast.AST, name: str, file: str) -> list[_Scope]:
    """Return a scope and those of the functions inside of it."""
    own, inner = _Scope(name), list[_Scope]()
    waiting = [(one, "") for one in ast.iter_child_nodes(scope)]
    while waiting:
        node, of = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner += _read_scopes(node, of if node.name == "__init__" else node.name, file)
            continue
        made_by = node.name if isinstance(node, ast.ClassDef) else of
        waiting += [(one, made_by) for one in ast.iter_child_nodes(node)]
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            called = last_name(node)
            own.calls.append((line, called))
            starts = called in ("prepare", "prepare_model", "initialize", "fit") or (
                called == "train" and "trainer" in ast.unparse(node.func).lower()
            )
            own.start = max(own.start, line if starts else 0)
        value = _read_flag(node)
        if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            own.thaws.append((f"{file}:{line}", line, isinstance(value, ast.Constant)))
    return [own, *inner]


def _read_flag(node: ast.AST) -> ast.expr | None:
    """Return the value that a statement gives `requires_grad`; None if it gives it none."""
    if isinstance(node, ast.Assign):
        named = any(getattr(one, "attr", "") == "requires_grad" for one in node.targets)
        return node.value if named else None
    if not isinstance(node, ast.Call):
        return None
    if getattr(node.func, "attr", "") == "requires_grad_":
        said = [*node.args, *(one.value for one in node.keywords)]
        return said[0] if said else ast.Constant(True)
    if getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
        name = node.args[1]
        return node.args[2] if getattr(name, "value", "") == "requires_grad" else None
    return None


@contextlib.contextmanager
def composed_as_training(model: nn.Module, layout: str) -> Iterator[list[str]]:
    """Let frozen weights train inside, where a run is composed, if the source thaws them later.

    Yields:
        Their names; the caller freezes them again.

    Raises:
        ConfigError: under fsdp, which settles at its start which weights train.
    """
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    place, is_sure = find_thaw() if frozen else ("", False)
    if not place or (layout == "fsdp" and not is_sure):
        yield []
        return
    if layout == "fsdp":
        raise ConfigError(
            f"{place}: lets weights train later, of which {len(frozen)} are frozen now ({frozen[0]}"
            f", …), and fsdp settles at its start which weights train; try: ddp, or let them train "
            f"when the model is prepared"
        )
    named = dict(model.named_parameters())
    for name in frozen:
        named[name].requires_grad_(True)
    try:
        yield frozen
    except BaseException:
        freeze_again(model, frozen)
        raise


def freeze_again(model: nn.Module, names: list[str]) -> None:
    """Freeze weights of a model by their names."""
    named = dict(model.named_parameters())
    for name in names:
        named[name].requires_grad_(False)
