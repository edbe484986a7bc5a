"""Write a script's final saves in its library's format, and report before training those refused.

    safetensors    one tensor per name; tied names once, `metadata[tied] = name`; tensors of a
                   structure by path, `model.0.weight`; plain values as JSON in the metadata
    pickles        of tensors and plain values alone, so that `torch.load(weights_only=True)` reads
                   them: a namespace becomes a dict, an array a tensor, other objects are left out

A script that trains for a week must not fail at its last line, so its source is read before the
first step: the main script and the modules it imported that are the user's own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

from shoal.base.errors import ConfigError, ShoalError
from shoal.base.runlog.environment import find_user_code
from shoal.trainer.run import Run

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.Size, torch.dtype, torch.device),
)
"""Types that `torch.load(weights_only=True)` reads besides tensors and containers."""
_LEFT_OUT = object()


def _refused_call(library: Any, name: str) -> str:
    """Return why a library's object refuses a method that the script calls; "" if it has it."""
    try:
        getattr(library, name)
    except ConfigError as failure:
        return f"is refused when the script comes to it: {failure}"
    return ""


def write_pickle(path: Path, value: Any) -> list[str]:
    """Write a structure by `torch.save`, tensors and plain values alone, whole or not at all.

    Args:
        path: of the file; its folder is made.
        value: a state dict, or dicts and lists that hold tensors and plain values.

    Returns:
        Paths and classes of the values that are left out.
    """
    lacks: list[str] = []
    plain = _to_plain(value, "", lacks)
    with _replacing(path) as half:
        torch.save(  # noqa: TID251  # decision 53: of tensors and plain values, for other tools
            None if plain is _LEFT_OUT else plain, half
        )
    return lacks


def _to_plain(value: Any, path: str, lacks: list[str]) -> Any:
    """Convert a structure to containers, tensors and plain values; note what has no such form.

    >>> lacks = []
    >>> value = {"a": argparse.Namespace(b=(1, Path("c"))), "d": [print], "e": np.float32(2)}
    >>> _to_plain(value, "", lacks), lacks
    ({'a': {'b': (1, 'c')}, 'd': [], 'e': 2.0}, ['d.0 (builtin_function_or_method)'])
    """
    dot = f"{path}." if path else ""
    if isinstance(value, torch.Tensor) and not hasattr(value.detach(), "to_local"):
        return _to_plain_tensor(value)
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.as_tensor(value) if value.ndim else value.item()
    value = _open_object(value)
    if isinstance(value, Mapping):
        pairs = [(key, _to_plain(one, f"{dot}{key}", lacks)) for key, one in value.items()]
        kept = OrderedDict((key, one) for key, one in pairs if one is not _LEFT_OUT)
        if (versions := getattr(value, "_metadata", None)) is not None:
            vars(kept)["_metadata"] = versions  # of a module's state dict
        return kept if isinstance(value, OrderedDict) else dict(kept)
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_to_plain(one, f"{dot}{place}", lacks) for place, one in enumerate(value)]
        made = [one for one in parts if one is not _LEFT_OUT]
        if isinstance(value, list):
            return made
        return tuple(made) if isinstance(value, tuple) else set(made)
    convert: Any
    for kind, convert in ((Enum, lambda one: one.value), (Path, str), (str, str), (int, int)):
        if isinstance(value, kind):
            return convert(value)
    lacks.append(f"{path or 'the object'} ({type(value).__name__})")
    return _LEFT_OUT


def _open_object(value: Any) -> Any:
    """Return the fields of an object with a state dict, of a namespace or of a dataclass."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return vars(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _to_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its class and graph; a copy if it is a part of a larger storage."""
    whole = tensor.detach()
    if type(whole) is not torch.Tensor:
        whole = whole.as_subclass(torch.Tensor)
    is_part = whole.untyped_storage().nbytes() > whole.numel() * whole.itemsize
    return whole.clone() if is_part else whole


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file beside `path`, and move it there at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield half
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def write_tensors(path: Path, value: Any) -> None:
    """Write the tensors of a structure as one safetensors file, whole or not at all.

    Args:
        path: of the file; its folder is made.
        value: a state dict, or dicts and lists that hold tensors and plain values.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for name, one in _walk_leaves(value):
        if isinstance(one, torch.Tensor):
            tensors[name] = one.detach()
        else:
            plain[name] = one
    metadata = {"format": "pt", **_find_ties(tensors)}
    if plain:
        metadata["values"] = json.dumps(plain, default=str)
    whole = {name: t.cpu().contiguous() for name, t in tensors.items() if name not in metadata}
    with _replacing(path) as half:
        save_file(_copy_shared(whole), half, metadata)


def _walk_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no dict, list or tuple, with its path."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    dot = f"{path}." if path else ""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _walk_leaves(one, f"{dot}{key}")
    elif isinstance(value, list | tuple) and any(_holds_tensor(one) for one in value):
        for place, one in enumerate(value):
            yield from _walk_leaves(one, f"{dot}{place}")
    else:
        yield path, value


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(one, torch.Tensor) for _, one in _walk_leaves(value))


def _find_ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return names of the very same tensor: each later one → the first one."""
    first: dict[Any, str] = {}
    found = {}
    for name, one in tensors.items():
        if not one.numel():
            continue
        same = (one.data_ptr(), one.dtype, one.shape, one.stride(), one.device)
        if first.setdefault(same, name) != name:
            found[name] = first[same]
    return found


def _copy_shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory with others, which the format cannot express."""
    storages: set[int] = set()
    found = {}
    for name, one in tensors.items():
        storage = one.untyped_storage()
        shared = storage.data_ptr() in storages or storage.nbytes() > one.numel() * one.itemsize
        storages.add(storage.data_ptr())
        found[name] = one.clone() if shared else one
    return found


@dataclass(frozen=True)
class SourceCall:
    """A call in the user's source.

    Attributes:
        file, line: of the call.
        of: last name of the object that a method is called on.
        name: of the function.
        is_method: it is called on an object.
        words: by name and by number: the text of each argument.
    """

    file: str
    line: int
    of: str
    name: str
    is_method: bool
    words: Mapping[str | int, str]

    @property
    def text(self) -> str:
        """Return the call as in the source, without arguments."""
        return f"{self.of or '…'}.{self.name}" if self.is_method else self.name

    def argument(self, name: str, place: int) -> str:
        """Return the text of an argument; "" if it is missing."""
        return self.words.get(name, self.words.get(place, ""))


@dataclass(frozen=True)
class ScriptSource:
    """Calls in the user's source, and the values of its variables.

    Attributes:
        makers: name of a variable → the functions whose result, or its first part, it is given.
    """

    calls: list[SourceCall]
    makers: Mapping[str, set[str]]

    def after(self, start: str) -> ScriptSource:
        """Return the source without calls before the first call of `start` in the same file."""
        first: dict[str, int] = {}
        for call in self.calls:
            if call.name == start:
                first.setdefault(call.file, call.line)
        later = [one for one in self.calls if one.line > first.get(one.file, 0)]
        return replace(self, calls=later)


def read_source() -> ScriptSource:
    """Read the main script, and those imported modules that are the user's own.

    Code that cannot run is left out: under `if False`, and in functions that no source names.
    """
    trees: dict[str, ast.Module] = {}
    for file, _ in find_user_code().values():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            trees[file] = ast.parse(Path(file).read_text(encoding="utf-8"))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    named = {last_name(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}
    makers: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            makers.setdefault(last_name(first), set()).add(last_name(node.value))
    calls = [call for file, tree in trees.items() for call in _walk_calls(file, tree, named)]
    return ScriptSource(calls, makers)


def _walk_calls(file: str, node: ast.AST, named: set[str]) -> Iterator[SourceCall]:
    """Yield the calls below a node, in the order of the source."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
        for other in node.orelse:
            yield from _walk_calls(file, other, named)
        return
    if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name not in named:
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        words: dict[str | int, str] = {n: ast.unparse(one) for n, one in enumerate(node.args)}
        words |= {one.arg or "**": ast.unparse(one.value) for one in node.keywords}
        is_method = isinstance(node.func, ast.Attribute)
        of = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        yield SourceCall(file, node.lineno, of, last_name(node.func), is_method, words)
    for child in ast.iter_child_nodes(node):
        yield from _walk_calls(file, child, named)


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression: of `a.unwrap(b).c` c, of `a.unwrap(b)` unwrap."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "id", ""))


Rule = Callable[[SourceCall], str]
"""Returns a call's difference from its library's, to print after `FILE:LINE: x.save`; or ""."""


def report_final_saves(
    run: Run, library: Any, makers: Set[str], start: str, near: str, gathers: str = ""
) -> None:
    """Print a line, before training, for each save call of the script that differs here.

    Args:
        run: the run.
        library: the object of the library that the script calls.
        makers: functions that return it.
        start: the call behind which the script trains.
        near: the call that gathers parts of weights.
        gathers: a call that shows that the script gathers them by itself.
    """
    source = read_source()
    holders = {name for name, made in source.makers.items() if made & makers}
    rules: list[Rule] = [
        lambda call: _refused_call(library, call.name) if call.of in holders else ""
    ]
    if run.plan.layout.zero == 3 and not any(call.name == gathers for call in source.calls):
        rules.append(_sharded_save_rule(near))
    told = set[tuple[str, str]]()
    for call in source.after(start).calls:
        for line in filter(None, (rule(call) for rule in rules)):
            if (call.name, line) not in told:
                told.add((call.name, line))
                shown = Path(call.file).name if os.path.isabs(call.file) else call.file
                run.recorder.notice(f"{shown}:{call.line}: {call.text} {line}")


def _sharded_save_rule(near: str) -> Rule:
    """Return the rule for layouts of which each rank holds parts of the weights.

    Args:
        near: the call that gathers them.
    """

    def rule(call: SourceCall) -> str:
        holds_weights = any(word in call.of.lower() for word in ("model", "module", "engine"))
        if not call.is_method or not holds_weights:
            return ""
        gathers = "state_dict" in call.words or "**" in call.words
        if (call.name == "save_pretrained" and not gathers) or call.name == "state_dict":
            return (
                f"is refused under fsdp (ZeRO stage 3), of whose weights a rank holds a part only; "
                f"where all ranks come to it a checkpoint is written instead; try: {near}"
            )
        return ""

    return rule


UNSAVED = "unsaved-weights"
"""The run folder, in the working folder, that a refused save leaves."""


def save_and_refuse(run: Run, failure: ConfigError, near: str) -> NoReturn:
    """Write a checkpoint in place of a refused save, then raise.

    If some ranks do not come here within seconds, no checkpoint is written: it needs them all.

    Args:
        run: the run.
        failure: the reason of the refusal.
        near: the call that saves.

    Raises:
        ConfigError: always, `failure` and the location of the weights.
    """
    saved = None
    if run.step_count and run.meeting.is_equal_on_ranks(f"rescue of step {run.step_count}"):
        with contextlib.suppress(ShoalError):
            saved = run.save(UNSAVED)
    why = str(failure).partition("; try: ")[0]
    if saved is None:
        raise ConfigError(f"{why}; try: {near}") from None
    raise ConfigError(
        f"{why}; the weights of step {run.step_count} are in {saved}; try: shoal checkpoint export "
        f"{UNSAVED} {UNSAVED}-exported; the next time {near}"
    ) from None


def rescue_refused_saves(run: Run, near: str) -> None:
    """Let a refused `run.model.state_dict()` write a checkpoint first (`save_and_refuse`)."""
    model, plain = run.model, run.model.state_dict

    def state_dict(*args: Any, **named: Any) -> Any:
        try:
            return plain(*args, **named)
        except ConfigError as failure:
            save_and_refuse(run, failure, near)

    vars(model)["state_dict"] = state_dict
    undo = partial(vars(model).pop, "state_dict", None)
    run.program = replace(run.program, on_close=(*run.program.on_close, undo))
