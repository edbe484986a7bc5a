"""Find the layers that can work on parts of a sequence: the blocks, and the layers beside them.

    blocks         the trunk's, one of each class is solved and equal ones share the result
    beside them    the outermost layers with parameters (a final norm, a head), each by itself
    embeddings     look up their part of the ids

A layer that cannot work on parts is tried child by child. The rest runs whole on every rank, which
is correct and needs the memory of one process; a notice names it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shoal.fabric.exchanges.ring_exchange import Ring
from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.rewrite import Shared
from shoal.parallel.spmd.split_block import BlockClass, BlockSplit, ModelSplit, split_block
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.graph.layer_groups import LayerGrouping
from shoal.trace.isolation.layer_calls import LayerCall, copy_without_numbers
from shoal.trace.isolation.random_draws import explain_keyed_blocks

SEQUENCE_DIM = 1
"""Token dim of hidden states [batch, tokens, dim]."""


@dataclass(frozen=True)
class SequenceUnits:
    """Layers that work on parts of the sequence.

    Attributes:
        classes: classes of equal layers that are split in the same way.
        lookups: names of embeddings.
        heads: names of heads whose vocabulary tp has split.
        whole: name of a block that runs whole, in full or mostly → the reason.
        length: tokens of the sample in the blocks' inputs; 0: no block takes [batch, tokens, dim].
        ring: the ranks, once the classes are checked on them.
    """

    classes: tuple[BlockClass, ...]
    lookups: tuple[str, ...]
    heads: tuple[str, ...]
    whole: dict[str, str]
    length: int
    ring: Ring | None = None


def plan_sequence_units(
    record: ForwardRecord, degree: int, attention: Shared | None, tensor: ModelSplit | None = None
) -> SequenceUnits:
    """Find the layers of a model that can work on parts of the sequence, over `degree` ranks.

    Args:
        attention: how ranks compute attention together; None: they gather keys and values.
        tensor: how tp divides the layers: each of its layers is one here, or works on all tokens.
    """
    return _UnitPlanner(record, degree, attention, tensor).find()


class _UnitPlanner:
    """Search for the layers of one model, with its results so far."""

    def __init__(
        self,
        record: ForwardRecord,
        degree: int,
        attention: Shared | None,
        tensor: ModelSplit | None,
    ) -> None:
        self.module, self.record = record.module, record
        self.degree, self.attention = degree, attention
        self.inner = {
            name: one.split for one in (tensor.classes if tensor else ()) for name in one.names
        }
        self.tables = () if tensor is None else (*tensor.tables.embeddings, *tensor.tables.heads)
        self.likeness = LayerGrouping(self.module)
        self.calls: dict[str, LayerCall] = {}
        self.classes: list[BlockClass] = []
        self.whole: dict[str, str] = {}

    def find(self) -> SequenceUnits:
        blocks = self.blocks()
        lookups = tuple(
            name
            for name, part in self.module.named_modules()
            if _is_plain_embedding(part) and not _is_within(name, blocks)
        )
        beside = [name for name in self.record.layers_beside_blocks() if name not in lookups]
        heads = tuple(name for name in beside if name in self.tables)
        beside = [name for name in beside if name not in heads]
        self.calls = self.record.calls([*blocks, *beside])
        for names in self.group_layers(list(blocks)):
            before = len(self.classes)
            why = self.split_group(names)
            if why:
                partly = len(self.classes) > before
                how = "shares tokens in its parts only" if partly else "runs whole on every rank"
                self.whole[names[0]] = f"{how}: {why}"
        for names in self.group_layers(beside):
            self.split_group(names)
        taken = {name for one in self.classes for name in one.names}
        return SequenceUnits(
            tuple(self.classes),
            tuple(name for name in lookups if not _is_within(name, taken)),
            heads,
            self.whole,
            max(
                (_count_tokens(self.calls[n]) for n in blocks or beside if n in self.calls),
                default=0,
            ),
        )

    def blocks(self) -> tuple[str, ...]:
        """Return the trunk's blocks; if only single layers repeat, all layers count as beside."""
        trunk = self.record.trunk
        return () if trunk.leaf else trunk.blocks

    def group_layers(self, names: list[str]) -> list[list[str]]:
        """Group equal layers that were called and that tp divides in the same way."""
        called = [name for name in names if name in self.calls]
        return self.likeness.group_layers_by(called, self.calls, lambda n: id(self.inner.get(n)))

    def split_group(self, names: list[str]) -> str:
        """Split equal layers, as a unit or by children; return why not as a unit, or ""."""
        why = self.try_to_split(names)
        if not why:
            return ""
        below = [
            [f"{n}.{child}" for n in names]
            for child, part in self.module.get_submodule(names[0]).named_children()
            if next(part.parameters(), None) is not None and not _is_plain_embedding(part)
        ]
        self.calls |= self.record.calls(alike[0] for alike in below)
        for alike in below:
            if alike[0] in self.calls:  # the layers around them are equal and so are their calls
                self.calls |= dict.fromkeys(alike, self.calls[alike[0]])
            for group in self.group_layers(alike):
                self.split_group(group)
        return why

    def try_to_split(self, names: list[str]) -> str:
        """Split equal layers as a unit; return the reason if that fails, else ""."""
        call = self.calls[names[0]]
        if not _count_tokens(call):
            return "it takes no hidden states [batch, tokens, dim]"
        if why := explain_keyed_blocks(names[0], self.record.blocks, self.record.draws):
            return why
        if call.unseen:
            return call.unseen
        if names[0] not in self.inner:
            if any(_is_within(part, {names[0]}) for part in (*self.inner, *self.tables)):
                return "tp divides its parts, each by itself"
            if _is_within(names[0], set(self.inner)):
                return "tp divides what it is a part of"
        twin = copy_without_numbers(self.module.get_submodule(names[0]))
        try:
            split = self.split_layer(twin, call, self.inner.get(names[0]))
        except Exception as failure:  # on any failure a layer can run whole; a notice names it
            return (str(failure).splitlines() or [type(failure).__name__])[0]
        if not any(isinstance(label, Split) for label in split.outputs):
            return "it needs the whole sequence on every rank"
        self.classes.append(BlockClass(tuple(names), split, twin, call))
        return ""

    def split_layer(self, twin: nn.Module, call: LayerCall, inner: BlockSplit | None) -> BlockSplit:
        return split_block(
            twin,
            call.args,
            call.kwargs,
            self.degree,
            sequence_dim=SEQUENCE_DIM,
            split_parameters=False,
            attention=self.attention,
            inner=inner,
        )


def _is_within(name: str, parts: tuple[str, ...] | set[str]) -> bool:
    """Return whether a module is one of `parts` or lies in one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _is_plain_embedding(part: nn.Module) -> bool:
    """Return whether a module is an embedding with torch's forward that reads single rows."""
    if not isinstance(part, nn.Embedding) or type(part).forward is not nn.Embedding.forward:
        return False
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


def _count_tokens(call: LayerCall) -> int:
    """Return the tokens of the first floating input if it is [batch, tokens, dim]; else 0."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    hidden = next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)
    return 0 if hidden is None or hidden.dim() != 3 else hidden.shape[SEQUENCE_DIM]
