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
from shoal.parallel.spmd.split_block import BlockCollective, BlockSplit
from shoal.trace.find.vocabulary_use import VocabularyTables
from shoal.trace.isolation.layer_calls import LayerCall

NUMBERS_PER_TOKEN = 3
"""Numbers per token that ranks exchange in the loss: largest logit, sum, the target's logit."""


class LayerClass(Protocol):
    """Group of equal layers that are split in the same way."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""

    @property
    def split(self) -> BlockSplit:
        """Split of each layer."""


def list_collectives(
    module: nn.Module,
    classes: Sequence[LayerClass],
    tables: VocabularyTables,
    calls: Mapping[str, LayerCall],
    degree: int,
) -> dict[str, tuple[BlockCollective, ...]]:
    """Return the collectives of one forward and backward pass, by module, in call order.

    The loss is assumed to be the default loss, which reads the logits of this rank's classes only.
    """
    splits = {name: one.split for one in classes for name in one.names}
    scattered = list_scattered_embeddings(classes, tables, calls)
    gives_parts = {name for name, split in splits.items() if _has_parts(split.outputs)} | scattered
    found: dict[str, tuple[BlockCollective, ...]] = {}
    for name in tables.embeddings:
        if name in tables.outputs:
            once = _list_lookup_collectives(name, tables.outputs[name], name in scattered)
            found[name] = once * len(calls[name].follows)
    handed_on = Counter(before for n in calls if n in splits for before in calls[n].follows)
    for name in (n for n in calls if n in splits):
        own = list(splits[name].exchanges) * len(calls[name].follows)
        hidden = _first_floating(calls[name])
        if _has_parts(splits[name].inputs):
            cut = sum(before not in gives_parts for before in calls[name].follows)
            own += [
                BlockCollective("all_gather", "backward", _bytes(hidden), f"{name}: its input")
            ] * cut
        if name in gives_parts:
            seen = len(calls[name].follows) - handed_on[name]
            own += [
                BlockCollective("all_gather", "forward", _bytes(hidden), f"{name}: its output")
            ] * seen
        found[name] = tuple(own)
    for name in tables.heads:
        if name in tables.outputs and name != tables.to_loss:
            found[name] = _list_head_collectives(
                module.get_submodule(name), tables.outputs[name], degree
            )
    if tables.to_loss and tables.hidden is not None:
        hidden = tables.hidden
        tokens = hidden.numel() // hidden.shape[-1]
        found["loss"] = (
            _loss_all_gather(tokens, hidden, degree),
            BlockCollective(
                "all_reduce", "forward", _bytes(hidden), "loss: gradient of hidden states"
            ),
        )
    return found


def list_scattered_embeddings(
    classes: Sequence[LayerClass], tables: VocabularyTables, calls: Mapping[str, LayerCall]
) -> frozenset[str]:
    """Return split embeddings whose output goes straight into a block that takes sequence parts.

    An embedding with a forward of its own passes on the whole output: its code may mix tokens.
    """
    return frozenset(
        before
        for one in classes
        if _has_parts(one.split.inputs)
        for name in one.names
        if name in calls
        for before in calls[name].follows
        if before in tables.embeddings and before not in tables.own_forwards
    )


def _list_lookup_collectives(
    name: str, output: Tensor, scattered: bool
) -> tuple[BlockCollective, ...]:
    """Return the collectives of a split embedding."""
    if not scattered:
        return (BlockCollective("all_reduce", "forward", _bytes(output), f"{name}: lookup"),)
    return (
        BlockCollective("reduce_scatter", "forward", _bytes(output), f"{name}: lookup"),
        BlockCollective("all_gather", "backward", _bytes(output), f"{name}: gradient"),
    )


def _list_head_collectives(
    head: nn.Module, logits: Tensor, degree: int
) -> tuple[BlockCollective, ...]:
    tokens = logits.numel() // logits.shape[-1]
    dim = head.get_parameter("weight").shape[1]
    return (
        _loss_all_gather(tokens, logits, degree),
        BlockCollective(
            "all_reduce", "backward", tokens * dim * logits.element_size(), "head: its input"
        ),
    )


def _loss_all_gather(tokens: int, like: Tensor, degree: int) -> BlockCollective:
    wide_bytes = max(4, like.element_size())
    size_bytes = degree * NUMBERS_PER_TOKEN * tokens * wide_bytes
    return BlockCollective("all_gather", "forward", size_bytes, "loss: three numbers per token")


def _has_parts(labels: Sequence[object]) -> bool:
    return any(isinstance(label, Split) for label in labels)


def _first_floating(call: LayerCall) -> Tensor:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
