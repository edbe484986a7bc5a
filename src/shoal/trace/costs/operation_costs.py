"""Add up the costs of every operation of a forward and backward pass.

Work      matrix products, convolutions and attention in FLOP; of everything else the bytes read and
          written; views and empty tensors cost nothing
Saved     what autograd keeps, each storage once with all its bytes, parameters and buffers left out
Split     whether tensor parallelism would split a tensor: a product with weights turns a whole
          tensor into a split one (columns) and a split one into a whole one (rows); attention is
          split by heads; all else follows its operands
Memory    allocations and frees of storages in order, from which a peak can be computed afterwards
Source    FLOP formulas: torch's own table, but attention: torch counts none for its CPU kernel
          (4·b·a·s·s·d, what a causal mask hides is not taken off), and grouped products of experts
          (2·rows·k·n, however the rows divide): torch knows their shapes in bf16 alone
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from shoal.trace._torch import TorchDispatchMode, pytree
from shoal.trace.graph.known_values import KnownValues

EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
GROUPED = torch.ops.aten._grouped_mm.default
RECURRENT = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
GATHERS = {"embedding", "index", "gather", "index_select", "slice_scatter", "select_scatter"}


@dataclass
class Tally:
    """Costs of consecutive operations, for the full example batch (terms as in `UnitFacts`).

    Attributes:
        saved: storages that autograd keeps → (bytes, split).
        products: outputs of matrix products and attention, in order: (bytes, split, is attention).
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    elementwise_bytes: float = 0.0
    operations: int = 0
    saved: Any = field(default_factory=WeakIdKeyDictionary)
    products: list[tuple[int, bool, bool]] = field(default_factory=list)

    def saved_bytes(self, split: bool) -> int:
        """Return the bytes of the storages that are (not) split."""
        return sum(size for size, cut in self.saved.values() if cut is split)


@dataclass
class _StorageInfo:
    """Storage: its number, whether it is split, whether it was made of weights alone."""

    number: int
    split: bool
    weight: bool


class CostRecorder(TorchDispatchMode):
    """Dispatch mode that counts operations into `tally`, which changes while a unit runs."""

    def __init__(self, constants: list[torch.Tensor]) -> None:
        """Set up; constants are parameters and buffers, whose storages are never activations."""
        super().__init__()
        self.tally = Tally()
        self.values = KnownValues()
        self.moves: list[tuple[int, int]] = []  # (number of the storage, bytes allocated or freed)
        self.constants: Any = WeakIdKeyDictionary()
        for tensor in constants:
            self.constants[tensor.untyped_storage()] = True
        self._known: Any = WeakIdKeyDictionary()
        self._last_words: dict[int, Any] = {}
        self._numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, then count it."""
        if (value := self.values.answer(func, args)) is not None:
            return value
        out = _grouped_output(*args) if func is GROUPED else func(*args, **(kwargs or {}))
        self.values.compute_result(func, args, kwargs or {}, out)
        if func.namespace != "prim":
            self._count(func, args, kwargs or {}, out)
        return out

    @contextmanager
    def count_into(self, tally: Tally) -> Iterator[Tally]:
        """Count into `tally` while the context is open, including what autograd saves."""
        before, self.tally = self.tally, tally
        try:
            with saved_tensors_hooks(self.save, _unchanged):
                yield tally
        finally:
            self.tally = before

    def mark_inputs(self, inputs: list[torch.Tensor]) -> None:
        """Mark a unit's inputs as whole tensors, whatever made them."""
        for tensor in inputs:
            self._register(tensor, False)
            if known := self._known.get(tensor.untyped_storage()):
                known.split = False

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves; return it without its graph, to let it be freed."""
        storage = tensor.untyped_storage()
        if not self.is_constant(tensor):
            self.tally.saved[storage] = (storage.nbytes(), self._split(tensor))
        return tensor.detach()

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in a parameter or a buffer."""
        return tensor.untyped_storage() in self.constants

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage in `moves`, or -1."""
        known = self._known.get(tensor.untyped_storage())
        return known.number if known else -1

    def peak_bytes(self, since: int, left_out: set[int]) -> int:
        """Return the peak of live bytes since `moves` had length `since`.

        Args:
            left_out: numbers of storages that do not count.
        """
        live = peak = 0
        for number, moved in self.moves[since:]:
            if number not in left_out:
                live += moved
                peak = max(peak, live)
        return peak

    def _split(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage())
        return known.split if known else False

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage())
        return known.weight if known else self.is_constant(tensor)

    def _register(self, tensor: torch.Tensor, split: bool, weight: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or storage in self.constants:
            return
        self._numbers += 1
        number, size = self._numbers, storage.nbytes()
        self._known[storage] = _StorageInfo(number, split, weight)
        self.moves.append((number, size))

        def gone(_: Any) -> None:
            self.moves.append((number, -size))
            self._last_words.pop(number, None)

        self._last_words[number] = weakref.ref(storage, gone)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        given = _tensors((args, kwargs))
        made = _tensors(out)
        attention = "scaled_dot_product" in name
        own = attention or name in RECURRENT or func is GROUPED
        product = own or _formula(func, name) is not None
        split = self._is_split(given, product, attention)
        old = {id(tensor.untyped_storage()) for tensor in given}
        weight = bool(given) and all(self._is_weight(tensor) for tensor in given)
        for tensor in made:
            self._register(tensor, split, weight)
        fresh = [t for t in made if id(t.untyped_storage()) not in old]
        if name in EMPTY or (not fresh and not func._schema.is_mutable):
            return
        self.tally.operations += 1
        if not product:
            self.tally.elementwise_bytes += _moved_bytes(name, given, made)
            return
        flops = _count_flops(func, name, args, kwargs, out)
        self.tally.flops += flops
        weights = any(self._is_weight(t) for t in given)
        self.tally.attention_flops += 0.0 if weights and not attention else flops
        size = sum(t.untyped_storage().nbytes() for t in fresh)
        self.tally.products.append((size, split, attention))

    def _is_split(self, given: list[torch.Tensor], product: bool, attention: bool) -> bool:
        own = [t for t in given if not self._is_weight(t)]
        any_split = any(self._split(tensor) for tensor in own)
        if attention or not product or len(own) == len(given):
            return attention or any_split
        return not any_split


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; for an expanded one, those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _moved_bytes(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    written = sum(_size(tensor) for tensor in made)
    return 2 * written if name in GATHERS else written + sum(_size(tensor) for tensor in given)


def _formula(func: Any, name: str) -> Any:
    """Return torch's FLOP formula for an operation, or for its out-of-place form."""
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return flop_registry.get(func.overloadpacket) or flop_registry.get(plain)


def _grouped_output(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return a grouped matrix product's output without data: rows or columns are in groups.

    a [rows, k] · b [groups, k, n] → [rows, n]; the backward makes [groups, m, n] of two matrices.
    """
    groups = () if a.dim() != b.dim() else (rest[0].shape[0] if a.dim() == 2 else a.shape[0],)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _count_flops(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> float:
    if name in RECURRENT:  # input and both weight matrices come first, backward too
        rows = args[0].shape[:-1].numel()
        return 2.0 * rows * (args[1].numel() + args[2].numel()) * (2 if "backward" in name else 1)
    if func is GROUPED:
        each = args[0].dim() == args[1].dim() == 3
        return (
            2.0 * args[0].shape[-2:].numel() * args[1].shape[-1] * (args[0].shape[0] if each else 1)
        )
    formula = _formula(func, name)
    if formula is not None and "scaled_dot_product" not in name:
        return float(formula(*args, **kwargs, out_val=out))
    q, k, v = [a for a in args if isinstance(a, torch.Tensor)][1 if "backward" in name else 0 :][:3]
    one_way = 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return 2 * one_way if "backward" in name else one_way
