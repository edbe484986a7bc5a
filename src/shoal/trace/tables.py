"""Finds the embeddings and output heads whose rows may be dealt to the ranks.

A table is split only if every use of it is understood: the forward of a plain nn.Embedding or
nn.Linear, or an output that hands hidden states and weight to the loss (fields `hidden`, `weight`
and `vocabulary`, as shoal.models.loss.Unprojected has). Uses are found by watching one forward
pass on a sample, operation by operation; whatever else reads a table keeps it whole, with the
reason.

Which ones are worth it: tables with more rows than columns (a vocabulary, not a list of positions),
and heads that come after the last block. Splitting costs one reduction of what a lookup gives, or a
gather of the logits where the loss is not the default one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace._torch import TorchDispatchMode, pytree
from shoal.trace.stand_in import StandIn
from shoal.trace.trunk import Run, without_trace

Table = nn.Embedding | nn.Linear


@dataclass(frozen=True)
class Tables:
    """Which parameters outside of the blocks are split over the vocabulary, along dim 0.

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
    """An output that leaves the projection to the loss."""
    fields = all(hasattr(value, name) for name in ("hidden", "weight", "vocabulary"))
    return dataclasses.is_dataclass(value) and fields


def find_tables(
    module: nn.Module,
    run: Run,
    blocks: Collection[str],
    degree: int,
    wish: Callable[[str], str | None],
) -> Tables:
    """The tables of `module` that `degree` ranks can split; one forward pass without a trace.

    run      calls the module on a sample and gives its outputs
    blocks   names of the modules that are split by other means: what lies in them is no table
    wish     what the user says of a parameter: `whole`, `column`, or None
    """
    candidates = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, Table)
        and _is_plain(part)
        and not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    seen = _watch(module, run, candidates, blocks)
    first = {id(p): name for name, p in module.named_parameters()}
    groups: dict[int, list[str]] = {}
    for name, part in candidates.items():
        groups.setdefault(id(part.weight), []).append(name)
    found = Tables(outputs=seen.outputs)
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
        if key in seen.handed:
            to_loss = names[-1]
    return dataclasses.replace(
        found,
        embeddings=tuple(embeddings),
        heads=tuple(heads),
        to_loss=to_loss,
        hidden=seen.hidden if to_loss else None,
    )


def _is_plain(part: Table) -> bool:
    """A layer whose forward is torch's own and reads single rows only."""
    if "forward" in part.__dict__:
        return False
    if isinstance(part, nn.Linear):
        return type(part).forward is nn.Linear.forward
    if type(part).forward is not nn.Embedding.forward:
        return False
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


class _Seen:
    """What one forward pass showed of the candidates.

    used     weights (by id) that something else than their own layer read → that operation
    handed   weights that the outputs hand to the loss
    outputs  what each layer gave, without data · late  layers called after the last block
    homes    other modules that hold a weight
    """

    def __init__(self, module: nn.Module, candidates: dict[str, Table]) -> None:
        self.used: dict[int, str] = {}
        self.handed: set[int] = set()
        self.hidden: Tensor | None = None
        self.outputs: dict[str, Tensor] = {}
        self.late: set[str] = set()
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
            if id(tensor) in self.used:
                return f"also read by {self.used[id(tensor)]} outside of its own layer"
        if id(weight) in self.homes:
            return f"also held by {self.homes[id(weight)]}"
        if id(weight) not in self.handed and not any(name in self.outputs for name in names):
            return "not used in the sample's forward pass"
        if rows < degree:
            return f"{rows} rows are fewer than {degree} ranks"
        embeds = any(isinstance(part, nn.Embedding) for part in parts)
        if not embeds and id(weight) not in self.handed and not self.late.intersection(names):
            return "a layer before or between the blocks"
        if rows <= columns and wish != "column":
            return f"{rows} rows of {columns} are no vocabulary: splitting costs more than it saves"
        return ""


class _Watcher(StandIn):
    """A candidate's forward, during which its own parameters may be read."""

    def __init__(self, name: str, block: nn.Module, uses: _Uses) -> None:
        self.uses = uses
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The layer's output."""
        uses, outer = self.uses, self.uses.allowed
        uses.allowed = {id(p) for p in self.block.parameters(recurse=False)}
        try:
            output = self.forward(*inputs, **named)
        finally:
            uses.allowed = outer
        uses.seen.outputs[self.name] = torch.empty_like(output, device="meta")
        uses.seen.late.add(self.name)
        return output


class _Uses(TorchDispatchMode):
    """Notes every operation that reads a watched parameter."""

    def __init__(self, seen: _Seen, watched: set[int]) -> None:
        super().__init__()
        self.seen, self.watched = seen, watched
        self.allowed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self.watched and id(leaf) not in self.allowed:
                self.seen.used.setdefault(id(leaf), str(func.overloadpacket).split(".")[-1])
        return func(*args, **(kwargs or {}))


def _watch(
    module: nn.Module, run: Run, candidates: dict[str, Table], blocks: Collection[str]
) -> _Seen:
    seen = _Seen(module, candidates)
    uses = _Uses(seen, {id(p) for part in candidates.values() for p in part.parameters()})
    watchers = [_Watcher(name, part, uses) for name, part in candidates.items()]
    hooks = [
        module.get_submodule(name).register_forward_hook(lambda *_: seen.late.clear())
        for name in blocks
    ]
    try:
        with torch.no_grad(), without_trace(module), uses:
            outputs = run(module)
    finally:
        for watcher in watchers:
            watcher.take_away()
        for hook in hooks:
            hook.remove()
    for leaf in pytree.tree_leaves(outputs, is_leaf=for_loss):
        if for_loss(leaf):
            seen.handed.add(id(leaf.weight))
            seen.hidden = torch.empty_like(leaf.hidden, device="meta")
        elif id(leaf) in uses.watched:
            seen.used.setdefault(id(leaf), "the model's outputs")
    return seen
