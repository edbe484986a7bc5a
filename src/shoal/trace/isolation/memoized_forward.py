"""Speed up a forward pass where only shapes and structure matter: equal layers compute once.

Inside of `memoize_layers`, the first call of a layer computes. A later call of another, equal layer
with inputs of the same kind returns copies of the first one's results. Listeners inside of the
layer receive the same entries again, under the second layer's names.

    always computes   a layer that changes its own attributes, receives an object that it might
                      write into (a cache), or returns one of the model's weights
    Limits            what equal layers change elsewhere (a list that they share) happens once. If
                      code around them depends on that, the pass fails: `run_memoized` then
                      runs it without copies
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.isolation.equal_layers import PLAIN, attribute_key, structure_key
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all

T = TypeVar("T")


class Log(Protocol):
    """Log of the listeners inside of layers, entry by entry."""

    def __len__(self) -> int:
        """Return the number of entries."""

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Record some entries again, for other modules: name → the other's name."""


def run_memoized(look: Callable[[bool], T]) -> T:
    """Return `look(True)`, which may reuse equal layers' results, or `look(False)` on failure."""
    try:
        return look(True)
    except Exception:  # of the user's model: without echoes it works, or raises the real error
        return look(False)


@contextmanager
def memoize_layers(module: nn.Module, log: Log) -> Iterator[None]:
    """Let equal layers of `module` compute once for each kind of input while the context is open.

    Args:
        log: log of listeners inside of layers; open the context before they are installed.
    """
    parts = {
        name: part
        for name, part in module.named_modules()
        if name
        and next(part.children(), None) is not None
        and next(part.parameters(), None) is not None
    }
    classes = Counter(type(part) for part in parts.values())
    forms = {
        name: (structure_key(part), attribute_key(part))
        for name, part in parts.items()
        if classes[type(part)] > 1
    }
    counts = Counter(forms.values())
    pool = _CallCache(
        log,
        {id(part): name for name, part in module.named_modules()},
        frozenset(id(t) for t in (*module.parameters(), *module.buffers())),
    )
    echoes = [
        _MemoizedForward(n, parts[n], form, pool) for n, form in forms.items() if counts[form] > 1
    ]
    try:
        yield
    finally:
        restore_all(echoes)


@dataclass(frozen=True)
class _MemoizedCall:
    """Computed call: its layer, its outputs, and its entries of the log.

    Attributes:
        leaves: leaves of its outputs: a tensor's copy, the position of an input that was passed on,
            or a plain value.
    """

    part: nn.Module
    leaves: tuple[Any, ...]
    structure: Any
    said: slice


@dataclass(frozen=True)
class _InputReference:
    """Input, by its position among the flattened ones."""

    index: int


@dataclass(frozen=True)
class _TensorCopy:
    """Numbers of a tensor, and whether it requires a gradient."""

    tensor: Tensor
    moves: bool


@dataclass
class _CallCache:
    """Computed calls of one pass, by kind of layer and inputs.

    Attributes:
        names: names of all modules.
        weights: ids of the model's own tensors.
    """

    log: Log
    names: dict[int, str]
    weights: frozenset[int]
    known: dict[Any, _MemoizedCall] = field(default_factory=dict)

    def replay_log(self, source: nn.Module, own: nn.Module, said: slice) -> None:
        """Repeat the log entries of one layer for another one."""
        pairs = zip(source.modules(), own.modules(), strict=True)
        names = {self.names[id(a)]: self.names[id(b)] for a, b in pairs}
        self.log.again(said, names)


class _MemoizedForward(ReplacedForward):
    """Replaced forward of a layer that first looks for the results of equal layers."""

    def __init__(self, name: str, block: nn.Module, form: Any, pool: _CallCache) -> None:
        self.form, self.pool = form, pool
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer's own forward, or copy the results of an equal layer."""
        leaves, structure = pytree.tree_flatten((inputs, named))
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            return self.forward(*inputs, **named)
        kind = (self.form, structure, torch.is_grad_enabled(), *map(_kind, leaves))
        known = self.pool.known.get(kind)
        if known is not None and known.part is not self.block:
            self.pool.replay_log(known.part, self.block, known.said)
            given = [_restore_output(leaf, leaves) for leaf in known.leaves]
            return pytree.tree_unflatten(given, known.structure)
        before, start = attribute_key(self.block), len(self.pool.log)
        outputs = self.forward(*inputs, **named)
        found, form = pytree.tree_flatten(outputs)
        kept = tuple(self._record_output(leaf, leaves) for leaf in found)
        if None not in kept and attribute_key(self.block) == before:
            said = slice(start, len(self.pool.log))
            self.pool.known[kind] = _MemoizedCall(self.block, kept, form, said)
        return outputs

    def _record_output(
        self, leaf: Any, inputs: list[Any]
    ) -> _TensorCopy | _InputReference | tuple[Any] | None:
        """Return the record of an output; None if it must not be returned again."""
        if not isinstance(leaf, Tensor):
            return (leaf,) if isinstance(leaf, PLAIN) else None
        for place, one in enumerate(inputs):
            if one is leaf:
                return _InputReference(place)
        copied = _TensorCopy(leaf.detach().clone(), leaf.requires_grad)
        return None if id(leaf) in self.pool.weights else copied


def _restore_output(kept: _TensorCopy | _InputReference | tuple[Any], inputs: list[Any]) -> Any:
    if isinstance(kept, _InputReference):
        return inputs[kept.index]
    if isinstance(kept, _TensorCopy):
        # No leaf of the graph: code after the layer may write into it.
        return kept.tensor.detach().requires_grad_(kept.moves).clone()
    return kept[0]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf
