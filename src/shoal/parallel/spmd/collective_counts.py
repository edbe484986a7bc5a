"""Count a split model's collectives, including those between blocks.

Inside of a block they are the collectives that `split_block` wrote into its graph. Between blocks,
a part of the sequence that goes from block to block costs nothing. A whole tensor that becomes
parts is gathered in the backward pass; parts that other code reads are gathered in the forward
pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.split_block import BlockSplit, Exchange
from shoal.trace.find.vocabulary_use import Tables
from shoal.trace.isolation.layer_calls import Call

NUMBERS_PER_TOKEN = 3
"""Numbers per token that ranks exchange in the loss: largest logit, sum, the target's logit."""


class Class(Protocol):
    """Group of equal layers that are split in the same way."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""

    @property
    def split(self) -> BlockSplit:
        """Split of each layer."""


def exchanges_of(
    module: nn.Module,
    classes: Sequence[Class],
    tables: Tables,
    calls: Mapping[str, Call],
    degree: int,
) -> dict[str, tuple[Exchange, ...]]:
    """Return the collectives of one forward and backward pass, by module, in call order.

    The loss is assumed to be the default loss, which reads the logits of this rank's classes only.
    """
    splits = {name: one.split for one in classes for name in one.names}
    scattered = scattered_lookups(classes, tables, calls)
    gives_parts = {name for name, split in splits.items() if _parts(split.outputs)} | scattered
    found: dict[str, tuple[Exchange, ...]] = {}
    for name in tables.embeddings:
        if name in tables.outputs:
            once = _lookup(name, tables.outputs[name], name in scattered)
            found[name] = once * len(calls[name].follows)
    handed_on = Counter(before for n in calls if n in splits for before in calls[n].follows)
    for name in (n for n in calls if n in splits):
        own = list(splits[name].exchanges) * len(calls[name].follows)
        hidden = _first_floating(calls[name])
        if _parts(splits[name].inputs):
            cut = sum(before not in gives_parts for before in calls[name].follows)
            own += [Exchange("all_gather", "backward", _bytes(hidden), f"{name}: its input")] * cut
        if name in gives_parts:
            seen = len(calls[name].follows) - handed_on[name]
            own += [Exchange("all_gather", "forward", _bytes(hidden), f"{name}: its output")] * seen
        found[name] = tuple(own)
    for name in tables.heads:
        if name in tables.outputs and name != tables.to_loss:
            found[name] = _head(module.get_submodule(name), tables.outputs[name], degree)
    if tables.to_loss and tables.hidden is not None:
        hidden = tables.hidden
        tokens = hidden.numel() // hidden.shape[-1]
        found["loss"] = (
            _told(tokens, hidden, degree),
            Exchange("all_reduce", "forward", _bytes(hidden), "loss: gradient of hidden states"),
        )
    return found


def scattered_lookups(
    classes: Sequence[Class], tables: Tables, calls: Mapping[str, Call]
) -> frozenset[str]:
    """Return split embeddings whose output goes straight into a block that takes sequence parts.

    An embedding with a forward of its own passes on the whole output: its code may mix tokens.
    """
    return frozenset(
        before
        for one in classes
        if _parts(one.split.inputs)
        for name in one.names
        if name in calls
        for before in calls[name].follows
        if before in tables.embeddings and before not in tables.own_forwards
    )


def _lookup(name: str, output: Tensor, scattered: bool) -> tuple[Exchange, ...]:
    """Return the collectives of a split embedding."""
    if not scattered:
        return (Exchange("all_reduce", "forward", _bytes(output), f"{name}: lookup"),)
    return (
        Exchange("reduce_scatter", "forward", _bytes(output), f"{name}: lookup"),
        Exchange("all_gather", "backward", _bytes(output), f"{name}: gradient"),
    )


def _head(head: nn.Module, logits: Tensor, degree: int) -> tuple[Exchange, ...]:
    tokens = logits.numel() // logits.shape[-1]
    dim = head.get_parameter("weight").shape[1]
    return (
        _told(tokens, logits, degree),
        Exchange("all_reduce", "backward", tokens * dim * logits.element_size(), "head: its input"),
    )


def _told(tokens: int, like: Tensor, degree: int) -> Exchange:
    wide_bytes = max(4, like.element_size())
    size_bytes = degree * NUMBERS_PER_TOKEN * tokens * wide_bytes
    return Exchange("all_gather", "forward", size_bytes, "loss: three numbers per token")


def _parts(labels: Sequence[object]) -> bool:
    return any(isinstance(label, Split) for label in labels)


def _first_floating(call: Call) -> Tensor:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
