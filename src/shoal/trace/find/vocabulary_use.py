"""Record the uses of embedding and linear weights in a forward pass.

Uses are seen in the record's forward pass, operation by operation. A use is the forward of a plain
nn.Embedding or nn.Linear, or a lookup in the forward of an embedding that does more (Gemma scales
the rows). It can also be an output that passes hidden states and weight to the loss (fields
`hidden`, `weight` and `vocabulary`, as in shoal.models.loss.Unprojected). From the uses,
`vocabulary_tables.py` decides which rows may be split over the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.trace._torch import TorchDispatchMode, pytree

Table = nn.Embedding | nn.Linear


@dataclass(frozen=True)
class VocabularyTables:
    """Embeddings and heads outside of blocks: which are split over the vocabulary, along dim 0.

    Attributes:
        split: parameter (first name) → reason.
        whole: the other candidates → reason why they stay whole.
        embeddings: names of the modules that look up split tables.
        own_forwards: those of them that compute with the looked-up rows.
        heads: names of the modules that multiply by split tables.
        to_loss: name of the module whose weight the model's output passes to the loss, or "".
        hidden: the hidden states that it passes, without data.
        outputs: outputs of the layers in the sample, without data.
    """

    split: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    own_forwards: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    to_loss: str = ""
    hidden: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def is_unprojected(value: Any) -> bool:
    """Return whether an output leaves the projection to the loss (has hidden and weight)."""
    fields = all(hasattr(value, name) for name in ("hidden", "weight", "vocabulary"))
    return dataclasses.is_dataclass(value) and fields


def is_table(part: nn.Module) -> TypeGuard[Table]:
    """Return whether a module is a plain linear layer, or an embedding that reads single rows.

    A weight or bias that is computed from others (`weight_norm`, parametrizations) is no table.
    """
    if not isinstance(part, Table) or "forward" in part.__dict__:
        return False
    if not isinstance(part._parameters.get("weight"), nn.Parameter):
        return False
    if isinstance(part, nn.Linear):
        return type(part).forward is nn.Linear.forward and "bias" in part._parameters
    if part.weight.dim() != 2:
        return False
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


def has_own_forward(part: nn.Module) -> bool:
    """Return whether an embedding's class computes with the rows that it looks up."""
    return isinstance(part, nn.Embedding) and type(part).forward is not nn.Embedding.forward


@dataclass(frozen=True)
class TableUses:
    """Uses of embeddings and linear layers in one forward pass.

    Attributes:
        used: weights (by id) that are read in another way too → the way: "also read by linear …".
        handed: weights that the outputs pass to the loss.
        hidden: hidden states that the loss multiplies with them.
        outputs: output of each layer, without data.
    """

    used: Mapping[int, str] = field(default_factory=dict)
    handed: frozenset[int] = frozenset()
    hidden: Tensor | None = None
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class TableUseRecorder(TorchDispatchMode):
    """Dispatch mode that records operations on some layers' weights, except the layers' own.

    Args:
        tables: layers, by name.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        super().__init__()
        self.weights = {
            name: {id(p) for p in ([t.weight] if has_own_forward(t) else t.parameters())}
            for name, t in tables.items()
        }
        self.watched = set().union(*self.weights.values())
        self.own_forwards = {name for name, t in tables.items() if has_own_forward(t)}
        self.used: dict[int, str] = {}
        self.outputs: dict[str, Tensor] = {}
        self.allowed: set[int] = set()
        self.at, self.found = "", False  # the layer called now; whether it has looked up rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and record it."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) not in self.watched:
                continue
            what = str(func.overloadpacket).split(".")[-1]
            if id(leaf) not in self.allowed:
                self.used.setdefault(id(leaf), f"also read by {what} outside of its own layer")
            elif self.at in self.own_forwards:
                return self._record_table_operation(self.at, id(leaf), what, func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _record_table_operation(
        self, name: str, weight: int, what: str, func: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run an operation of a layer on its own table; record it unless it is the one lookup."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is not torch.ops.aten.embedding or self.found:
            again = "again " if self.found else ""
            self.used.setdefault(weight, f"its own forward reads it {again}by {what}")
        else:
            self.outputs[name] = torch.empty_like(result, device="meta")
        self.found = True
        return result

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Open a layer's call, in which it may read its own weights."""
        self.found = False
        return self._allow_reads(self.weights.get(name, self.allowed), name)

    def ignore_reads(self) -> AbstractContextManager[None]:
        """Ignore all reads while the context is open: they are not the model's."""
        return self._allow_reads(self.watched, "")

    @contextmanager
    def _allow_reads(self, allowed: set[int], at: str) -> Iterator[None]:
        outer = self.allowed, self.at
        self.allowed, self.at = allowed, at
        try:
            yield
        finally:
            self.allowed, self.at = outer

    def record_output(self, name: str, output: Any) -> None:
        """Record the output of a layer."""
        if name in self.weights and name not in self.own_forwards:
            self.outputs[name] = torch.empty_like(output, device="meta")

    def of(self, outputs: Any) -> TableUses:
        """Return all uses of the pass that returned these outputs."""
        handed, hidden = set(), None
        for leaf in pytree.tree_leaves(outputs, is_leaf=is_unprojected):
            if is_unprojected(leaf):
                handed.add(id(leaf.weight))
                hidden = torch.empty_like(leaf.hidden, device="meta")
            elif id(leaf) in self.watched:
                self.used.setdefault(id(leaf), "also read by the model's outputs")
        return TableUses(self.used, frozenset(handed), hidden, self.outputs)
