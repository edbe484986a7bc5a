"""Finds the embeddings and output heads whose rows may be dealt to the ranks.

A table is split only if every use of it is understood: the forward of a plain nn.Embedding or
nn.Linear, or an output that hands hidden states and weight to the loss (fields `hidden`, `weight`
and `vocabulary`, as shoal.models.loss.Unprojected has). Uses are seen in the record's forward pass,
operation by operation; whatever else reads a table keeps it whole, with the reason.

Which ones are worth it: tables with more rows than columns (a vocabulary, not a list of positions),
and heads that come after the last block. Splitting costs one reduction of what a lookup gives, or a
gather of the logits where the loss is not the default one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.trace._torch import TorchDispatchMode, pytree

Table = nn.Embedding | nn.Linear


@dataclass(frozen=True)
class Tables:
    """Embeddings and heads outside of blocks: which are split over the vocabulary, along dim 0.

    split        parameter (first name) → why · whole  the other candidates → why not
    embeddings   names of the modules that look up split tables
    heads        names of those that multiply by them
    to_loss      name of the module whose weight the model's output hands to the loss, or ""
    hidden       the hidden states that it hands over, without data
    outputs      what the layers gave in the sample, without data
    """

    split: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    to_loss: str = ""
    hidden: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def for_loss(value: Any) -> bool:
    """Whether an output leaves the projection to the loss: a dataclass with hidden and weight."""
    fields = all(hasattr(value, name) for name in ("hidden", "weight", "vocabulary"))
    return dataclasses.is_dataclass(value) and fields


def find_tables(
    module: nn.Module,
    uses: TableUses,
    order: Sequence[str],
    blocks: Collection[str],
    degree: int,
    wish: Callable[[str], str | None],
) -> Tables:
    """The tables of `module` that `degree` ranks can split, of which one forward pass is known.

    uses     who read which table · order  modules in the order of their calls' ends
    blocks   names of the modules that are split by other means: what lies in them is no table
    wish     what the user says of a parameter: `whole`, `column`, or None
    """
    candidates = {
        name: part
        for name, part in module.named_modules()
        if is_table(part)
        and not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    seen = _Candidates(module, candidates, uses, order, blocks)
    first = {id(p): name for name, p in module.named_parameters()}
    groups: dict[int, list[str]] = {}
    for name, part in candidates.items():
        groups.setdefault(id(part.weight), []).append(name)
    found = Tables(outputs={n: out for n, out in uses.outputs.items() if n in candidates})
    embeddings: list[str] = []
    heads: list[str] = []
    to_loss = ""
    for key, names in groups.items():
        parameter = first[key]
        parts = [candidates[name] for name in names]
        refused = seen.reason(parts, names, degree, wish(parameter))
        if refused:
            found.whole[parameter] = refused
            continue
        found.split[parameter] = f"rows of the vocabulary, {parts[0].weight.shape[0]} in all"
        for name, part in zip(names, parts, strict=True):
            (embeddings if isinstance(part, nn.Embedding) else heads).append(name)
            if isinstance(part, nn.Linear) and part.bias is not None:
                found.split[first[id(part.bias)]] = "with the rows of its weight"
        if key in uses.handed:
            to_loss = names[-1]
    return dataclasses.replace(
        found,
        embeddings=tuple(embeddings),
        heads=tuple(heads),
        to_loss=to_loss,
        hidden=uses.hidden if to_loss else None,
    )


def is_table(part: nn.Module) -> TypeGuard[Table]:
    """A layer whose forward is torch's own and reads single rows only."""
    if not isinstance(part, Table) or "forward" in part.__dict__:
        return False
    if isinstance(part, nn.Linear):
        return type(part).forward is nn.Linear.forward
    if type(part).forward is not nn.Embedding.forward:
        return False
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


@dataclass(frozen=True)
class TableUses:
    """What one forward pass showed of embeddings and linear layers.

    used     weights (by id) that something else than their own layer read → that operation
    handed   weights that the outputs hand to the loss · hidden  what they are multiplied with there
    outputs  what each layer gave, without data
    """

    used: Mapping[int, str] = field(default_factory=dict)
    handed: frozenset[int] = frozenset()
    hidden: Tensor | None = None
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class Uses(TorchDispatchMode):
    """Notes every operation that reads the weights of some layers, but their own.

    tables   layers, by name
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        super().__init__()
        self.weights = {name: {id(p) for p in t.parameters()} for name, t in tables.items()}
        self.watched = set().union(*self.weights.values())
        self.used: dict[int, str] = {}
        self.outputs: dict[str, Tensor] = {}
        self.allowed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self.watched and id(leaf) not in self.allowed:
                self.used.setdefault(id(leaf), str(func.overloadpacket).split(".")[-1])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """A layer is called: it may read its own weights."""
        outer = self.allowed
        self.allowed = self.weights.get(name, outer)
        try:
            yield
        finally:
            self.allowed = outer

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Inside, whatever is read is no use of the model's."""
        outer, self.allowed = self.allowed, self.watched
        try:
            yield
        finally:
            self.allowed = outer

    def gave(self, name: str, output: Any) -> None:
        """What a layer gave."""
        if name in self.weights:
            self.outputs[name] = torch.empty_like(output, device="meta")

    def of(self, outputs: Any) -> TableUses:
        """Everything that was seen in a pass that gave these outputs."""
        handed, hidden = set(), None
        for leaf in pytree.tree_leaves(outputs, is_leaf=for_loss):
            if for_loss(leaf):
                handed.add(id(leaf.weight))
                hidden = torch.empty_like(leaf.hidden, device="meta")
            elif id(leaf) in self.watched:
                self.used.setdefault(id(leaf), "the model's outputs")
        return TableUses(self.used, frozenset(handed), hidden, self.outputs)


class _Candidates:
    """Layers that may be tables, and what a forward pass showed of them.

    late     layers called after the last block · homes  other modules that hold a weight
    """

    def __init__(
        self,
        module: nn.Module,
        candidates: dict[str, Table],
        uses: TableUses,
        order: Sequence[str],
        blocks: Collection[str],
    ) -> None:
        self.uses = uses
        last = max((place for place, name in enumerate(order) if name in blocks), default=-1)
        self.late = {name for name in order[last + 1 :] if name in candidates}
        known = {f"{name}.{key}" for name, p in candidates.items() for key in p._parameters}
        self.homes = {
            id(p): name
            for name, p in module.named_parameters(remove_duplicate=False)
            if name not in known
        }

    def reason(self, parts: list[Table], names: list[str], degree: int, wish: str | None) -> str:
        """Why the weight that these layers share stays whole; empty if it can be split."""
        weight = parts[0].weight
        biases = [p.bias for p in parts if isinstance(p, nn.Linear) and p.bias is not None]
        rows, columns = weight.shape
        if wish == "whole":
            return "the user's wish"
        for tensor in (weight, *biases):
            if id(tensor) in self.uses.used:
                return f"also read by {self.uses.used[id(tensor)]} outside of its own layer"
        if id(weight) in self.homes:
            return f"also held by {self.homes[id(weight)]}"
        if id(weight) not in self.uses.handed and not any(
            name in self.uses.outputs for name in names
        ):
            return "not used in the sample's forward pass"
        if rows < degree:
            return f"{rows} rows are fewer than {degree} ranks"
        embeds = any(isinstance(part, nn.Embedding) for part in parts)
        if not embeds and id(weight) not in self.uses.handed and not self.late.intersection(names):
            return "a layer before or between the blocks"
        if rows <= columns and wish != "column":
            return f"{rows} rows of {columns} are no vocabulary: splitting costs more than it saves"
        return ""
