"""See numbers that a recorded layer reads and that a script changes after the start.

    block.factor = 0.5 · WARM["factor"] = 0.5 · block.act = nn.Tanh() · block.forward = faster

Under tp and cp layers run as graphs, which were recorded when the run began. A number of Python, a
function or a layer that the recording met is a part of the graph; what takes its place later is not
read. The layer's own code would read it, and so would one process.

A number that the model's own forward pass changes is left out: a graph that reads it is recorded
anew, and `hidden_state.py` names numbers that count passes.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.parallel.program import Program
from shoal.trainer.guards.guard import Guard

PLAIN = (bool, int, float, str, type(None))
LAYERS = (nn.Module, type, types.ModuleType, types.FunctionType)
LIBRARIES = ("torch", "shoal", "builtins")
MOST, FOLLOWED, STEPS, EVERY = 2_000, 3, 8, 32
"""Values of a kind at most · first steps whose forward passes are followed · first steps in which
values are compared, and in which of the others."""
LEFT_OUT = frozenset({"training"})


@dataclass(frozen=True)
class HeldValue:
    """A value that a graph may hold.

    Attributes:
        scope: dict that has it.
        key: its key there.
        value: the value; of a class, while the dict of the object has no such key.
        name: for a line.
        items: copy of a value that is a dict.
    """

    scope: Mapping[str, Any]
    key: str
    value: Any
    name: str
    items: dict[Any, Any] | None = None


def list_changed(held: Sequence[HeldValue]) -> list[HeldValue]:
    """Return those in whose place another value is; it makes no Python call for each of them."""
    found = []
    for one in held:
        now = one.scope.get(one.key, one.value)
        if one.items is not None:
            is_same = now == one.items
        else:
            is_same = now is one.value or (isinstance(now, PLAIN) and now == one.value)
        if not is_same:
            found.append(one)
    return found


class TracedValuesGuard(Guard):
    """Guard against changes of values that the graphs of layers hold.

    Args:
        program: the run's.
        notice: prints a line, by rank 0.
    """

    def __init__(self, program: Program, notice: Callable[[str], None]) -> None:
        self.module, self.notice = program.module, notice
        self._is_pipeline = program.pipe.size > 1
        self.layout = program.plan.layout.text()
        self.held = list(itertools.islice(_list_values(self.module), MOST))
        self._before = set[int]()
        self._is_over = False

    def due(self, step: int) -> bool:
        """Return True in the first steps, and then from time to time."""
        return not self._is_over and (step <= STEPS or step % EVERY == 0)

    def before(self, step: int, batch: Any) -> None:
        """Print a line, once, if a value is another one."""
        if self._is_over:
            return
        if step == 1:  # what the run itself puts into layers is there now
            self.held += itertools.islice(_list_parts(self.module), MOST)
        if changed := list_changed(self.held):
            self._is_over = True
            self.notice(changed_line(changed[0].name, self.layout))

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None] | None:
        """Return a context around the passes of a first step: what does the model itself write?"""
        return self._drop_own_values() if step <= FOLLOWED and not self._is_over else None

    @contextmanager
    def _drop_own_values(self) -> Iterator[None]:
        """Leave out the values that a forward pass inside changes."""
        if self._is_pipeline:  # no user code runs between its passes
            self._enter_model()
            yield
            self._exit_model()
            return
        hooks = (
            self.module.register_forward_pre_hook(self._enter_model),
            self.module.register_forward_hook(self._exit_model),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_model(self, *_call: Any) -> None:
        self._before = set(map(id, list_changed(self.held)))

    def _exit_model(self, *_call: Any) -> None:
        own = set(map(id, list_changed(self.held))) - self._before
        if own:
            self.held = [one for one in self.held if id(one) not in own]


def _list_values(module: nn.Module) -> Iterator[HeldValue]:
    """Yield numbers and texts of layers, of objects and classes of theirs, and of globals."""
    seen = set[int]()
    for path, layer in module.named_modules():
        own = vars(layer)
        for key, value in own.items():
            name = f"{path}.{key}".lstrip(".")
            if isinstance(value, PLAIN) and not key.startswith("_") and key not in LEFT_OUT:
                yield HeldValue(own, key, value, name)
            is_object = hasattr(value, "__dict__") and not isinstance(value, LAYERS)
            if is_object and not key.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                for inner, one in vars(value).items():
                    if isinstance(one, PLAIN) and not inner.startswith("_"):
                        yield HeldValue(vars(value), inner, one, f"{name}.{inner}")
        yield from _list_class_values(path, layer)
        function = type(layer).forward
        if id(function) not in seen:
            seen.add(id(function))
            yield from _list_globals(function)


def _list_class_values(path: str, layer: nn.Module) -> Iterator[HeldValue]:
    for kind in type(layer).__mro__:
        if kind.__module__.partition(".")[0] in LIBRARIES:
            continue
        for key, value in vars(kind).items():
            if isinstance(value, bool | int | float) and not key.startswith("_"):
                if key not in vars(layer):
                    yield HeldValue(vars(layer), key, value, f"{path}.{key}".lstrip("."))
                yield HeldValue(vars(kind), key, value, f"{kind.__name__}.{key}")


def _list_globals(function: Any) -> Iterator[HeldValue]:
    """Yield numbers, and dicts of them, that a function reads of its module."""
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or str(function.__module__).partition(".")[0] in LIBRARIES:
        return
    for key in code.co_names:
        value, name = scope.get(key), f"the global {key}"
        if isinstance(value, bool | int | float):
            yield HeldValue(scope, key, value, name)
        elif type(value) is dict and all(isinstance(one, PLAIN) for one in value.values()):
            yield HeldValue(scope, key, value, name, dict(value))


def _list_parts(module: nn.Module) -> Iterator[HeldValue]:
    """Yield layers without weights inside of others, and functions that take forward's place."""
    for path, layer in module.named_modules():
        own = vars(layer)
        name = f"{path}.forward".lstrip(".")
        yield HeldValue(own, "forward", own.get("forward"), name)
        for key, part in layer._modules.items():
            if part is not None and next(part.parameters(), None) is None:
                yield HeldValue(layer._modules, key, part, f"{path}.{key}".lstrip("."))


def changed_line(name: str, layout: str) -> str:
    """Return the notice on a value that was changed after the layers were recorded.

    Args:
        name: of the value.
        layout: of the run.
    """
    return (
        f"model: {name} was changed since shoal.parallelize was called, and under {layout} layers "
        f"run as graphs that were recorded then, with what it was; try: a buffer (a tensor that "
        f"the script fills) in the place of a number, layout.strategy=fsdp, or run.save and "
        f"shoal.parallelize again; if no forward pass reads it, all is well"
    )
