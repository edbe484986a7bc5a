"""Detect state that a model carries from batch to batch in plain attributes, not in buffers.

A recurrent layer that keeps its last hidden state, a running mean in an attribute: in one process
each batch meets the one before it. Ranks have other batches, and micro-batches are smaller. So the
state depends on the layout, and no checkpoint has it. That is legal (a stream per rank), but rarely
intended.

The check takes two steps: the second must read and replace the tensor that the first left in an
attribute. Tables that are computed once (rotary angles, masks) are not reported.

A random generator of the model's own is reported after the first step, if a forward pass drew from
it: every rank draws the same numbers for other samples, and each micro-batch goes on in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.layouts.policies import CompilePolicy
from shoal.parallel._torch import version_counter
from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.guards import reports
from shoal.trainer.guards.guard import Guard

States = dict[str, torch.Tensor]
"""Name of a plain attribute (`rnn.state`, `rnn.state[1]`) → the tensor in it."""

Written = dict[str, tuple[torch.Tensor, int]]
"""Name of a plain attribute → its tensor, and the tensor's write counter."""

OWN = frozenset(vars(nn.Module()))
"""Attributes of every module."""

ASKED = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point"})
"""Functions that read a tensor's form, and none of its numbers."""


GENERATORS = frozenset({"Generator", "RandomState", "Random"})
"""Names of classes of random generators."""


class HiddenStateGuard(Guard):
    """Guard against state in plain attributes that a model carries from batch to batch."""

    def __init__(self, program: Program, notice: Callable[[str], None]) -> None:
        self.module, self.notice = program.module, notice
        # A mode would recompile a compiled block, and threads have modes of their own.
        self.looks = (
            not program.plan.differs_from_default(CompilePolicy)
            and program.plan.layout.strategy != "dp"
        )
        self.alone = program.data.size == 1
        self._counting = set[str]()
        # Keeps the tensors for two steps: a new tensor may reuse the id of a freed one.
        self._before = self._left = (
            _with_write_counters(list_attribute_tensors(self.module)) if self.looks else {}
        )

    def due(self, step: int) -> bool:
        """Return True in the first steps, and in the one that drops the kept tensors."""
        return self.looks and bool(step <= 2 or self._before or self._left)

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None] | None:
        """Return a context around the passes of steps 1 and 2; a notice may follow the second."""
        if step > 2 or (self.alone and micro_batches < 2):
            self._before = self._left = {}
            return None
        # With one pass a step a number that counts passes counts steps.
        counts = micro_batches > 1
        return self._watch_first_step(counts) if step == 1 else self._watch_second_step()

    @contextmanager
    def _watch_first_step(self, counts: bool) -> Iterator[None]:
        before = list_attribute_numbers(self.module) if counts else {}
        with self._watch_generators():
            yield
        self._counting = _changed(before, list_attribute_numbers(self.module)) if counts else set()
        self._left = _with_write_counters(list_attribute_tensors(self.module))

    def _watch_generators(self) -> AbstractContextManager[None]:
        held = {type(one).__name__ for part in self.module.modules() for one in vars(part).values()}
        if held.isdisjoint(GENERATORS):
            return nullcontext()
        from shoal.trainer.guards.own_generators import watch_generators

        return watch_generators(self.module, self.notice)

    @contextmanager
    def _watch_second_step(self) -> Iterator[None]:
        counting = list_attribute_numbers(self.module) if self._counting else {}
        held = list_attribute_tensors(self.module)
        changed = {n: t for n, t in held.items() if not _is_unchanged(n, self._left, self._before)}
        with _TensorReadMode(changed) if changed else nullcontext() as reads:
            yield
        now = _with_write_counters(list_attribute_tensors(self.module)) if reads else {}
        found = sorted(
            n for n in (reads.names if reads else ()) if not _is_unchanged(n, now, self._left)
        )
        self._before = self._left = {}
        if self._counting:
            both = self._counting & _changed(counting, list_attribute_numbers(self.module))
            for name in sorted(both)[:1]:
                self.notice(reports.model_notices.counted_passes_line(name))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            self.notice(
                f"model: {found[0]}{more} is computed in one pass and read in the next: every rank "
                f"carries its own from batch to batch, every micro-batch meets the one before it, "
                f"and no checkpoint has it; try: begin each forward pass with a fresh one, or "
                f"bring it with the batch; if a stream per rank is meant, all is well"
            )


class _TensorReadMode(TorchFunctionMode):
    """Mode that collects which of some tensors torch functions read."""

    def __init__(self, held: States) -> None:
        super().__init__()
        self.held = {id(tensor): name for name, tensor in held.items()}
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ASKED:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self.held:
                    self.names.add(self.held[id(leaf)])
        return func(*args, **(kwargs or {}))


def list_attribute_tensors(module: nn.Module) -> States:
    """Return the tensors in plain attributes of a module's layers, alone or in containers."""
    found: States = {}
    for path, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key in OWN:
                continue
            for place, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                    found[f"{path}.{key}".lstrip(".") + pytree.keystr(place)] = leaf
    return found


def list_attribute_numbers(module: nn.Module) -> dict[str, float]:
    """Return the numbers in plain attributes of a module's layers, by name."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in OWN and type(value) in (int, float)
    }


def _changed(before: Mapping[str, float], now: Mapping[str, float]) -> set[str]:
    """Return names of numbers that are others now, or new."""
    return {name for name, value in now.items() if before.get(name) != value}


def _with_write_counters(states: States) -> Written:
    return {n: (t, 0 if t.is_inference() else version_counter(t)) for n, t in states.items()}


def _is_unchanged(name: str, one: Written, other: Written) -> bool:
    """Return whether an attribute holds the same tensor in two snapshots, with no write between."""
    if name not in one or name not in other:
        return name not in one
    return one[name][0] is other[name][0] and one[name][1] == other[name][1]
