"""Makes a forward pass cheap where only shapes and structure matter: equal layers compute once.

Inside of `echoing`, the first call of a layer computes. A later call of another layer that is made
alike, with inputs of the same kind, gives copies of what the first one gave, and whoever listens
inside of the layer is told the same once more, under the second layer's names.

    always computes   a layer that changes its own attributes, is handed an object that it might
                      write into (a cache), or returns one of the model's weights
    Limits            what equal layers change elsewhere (a list that they share) happens once. If
                      code around them cannot live with that, the pass fails: `as_cheaply` then
                      runs it as it is
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
from shoal.trace.isolation.equal_layers import PLAIN, attributes_of, shapes_of
from shoal.trace.isolation.replaced_forward import StandIn

T = TypeVar("T")


class Log(Protocol):
    """What listeners inside of layers note, entry by entry."""

    def __len__(self) -> int:
        """How many entries there are."""

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Note some entries once more, of other modules: name → its name."""


class NoLog:
    """Nobody listens inside of layers."""

    def __len__(self) -> int:
        """Nothing was noted."""
        return 0

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Nothing to note."""


def as_cheaply(look: Callable[[bool], T]) -> T:
    """`look(True)`, which may use echoes, or `look(False)` if that fails."""
    try:
        return look(True)
    except Exception:  # of the user's model: without echoes it works, or says what is wrong
        return look(False)


@contextmanager
def echoing(module: nn.Module, log: Log) -> Iterator[None]:
    """Inside, layers of `module` that are made alike compute once for each kind of input.

    Args:
        log: of listeners inside of layers; enter before they are there.
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
        name: (shapes_of(part), attributes_of(part))
        for name, part in parts.items()
        if classes[type(part)] > 1
    }
    counts = Counter(forms.values())
    pool = _Pool(
        log,
        {id(part): name for name, part in module.named_modules()},
        frozenset(id(t) for t in (*module.parameters(), *module.buffers())),
    )
    echoes = [_Echo(n, parts[n], form, pool) for n, form in forms.items() if counts[form] > 1]
    try:
        yield
    finally:
        for echo in echoes:
            echo.take_away()


@dataclass(frozen=True)
class _Computed:
    """A call that computed: of which layer, what it gave, and which entries of the log tell of it.

    Attributes:
        leaves: of its outputs: a tensor's copy, or the place of an input that was handed on, or a
            plain value.
    """

    part: nn.Module
    leaves: tuple[Any, ...]
    structure: Any
    said: slice


@dataclass(frozen=True)
class _Place:
    """An input, by its place among the flattened ones."""

    index: int


@dataclass(frozen=True)
class _Copy:
    """A tensor's numbers, and whether it takes a gradient."""

    tensor: Tensor
    moves: bool


@dataclass
class _Pool:
    """What one pass computed, by kind of layer and inputs.

    Attributes:
        names: of all modules.
        weights: ids of the model's own tensors.
    """

    log: Log
    names: dict[int, str]
    weights: frozenset[int]
    known: dict[Any, _Computed] = field(default_factory=dict)

    def tell(self, source: nn.Module, own: nn.Module, said: slice) -> None:
        """What was told of one layer, told of another one."""
        pairs = zip(source.modules(), own.modules(), strict=True)
        names = {self.names[id(a)]: self.names[id(b)] for a, b in pairs}
        self.log.again(said, names)


class _Echo(StandIn):
    """A layer's forward that asks first what equal layers gave."""

    def __init__(self, name: str, block: nn.Module, form: Any, pool: _Pool) -> None:
        self.form, self.pool = form, pool
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The layer's own forward, or an echo of an equal one's."""
        leaves, structure = pytree.tree_flatten((inputs, named))
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            return self.forward(*inputs, **named)
        kind = (self.form, structure, torch.is_grad_enabled(), *map(_kind, leaves))
        known = self.pool.known.get(kind)
        if known is not None and known.part is not self.block:
            self.pool.tell(known.part, self.block, known.said)
            given = [_given(leaf, leaves) for leaf in known.leaves]
            return pytree.tree_unflatten(given, known.structure)
        before, start = attributes_of(self.block), len(self.pool.log)
        outputs = self.forward(*inputs, **named)
        found, form = pytree.tree_flatten(outputs)
        kept = tuple(self._kept(leaf, leaves) for leaf in found)
        if None not in kept and attributes_of(self.block) == before:
            said = slice(start, len(self.pool.log))
            self.pool.known[kind] = _Computed(self.block, kept, form, said)
        return outputs

    def _kept(self, leaf: Any, inputs: list[Any]) -> _Copy | _Place | tuple[Any] | None:
        """What to remember of an output; None where it must not be given again."""
        if not isinstance(leaf, Tensor):
            return (leaf,) if isinstance(leaf, PLAIN) else None
        for place, one in enumerate(inputs):
            if one is leaf:
                return _Place(place)
        copied = _Copy(leaf.detach().clone(), leaf.requires_grad)
        return None if id(leaf) in self.pool.weights else copied


def _given(kept: _Copy | _Place | tuple[Any], inputs: list[Any]) -> Any:
    if isinstance(kept, _Place):
        return inputs[kept.index]
    if isinstance(kept, _Copy):
        # No leaf of the graph: code behind the layer may write into it.
        return kept.tensor.detach().requires_grad_(kept.moves).clone()
    return kept[0]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf
