"""Run a layer on this rank's tokens, instead of its own forward.

    layer       its split graph: parameters whole, tokens in parts, attention by all ranks together
    embedding   looks up this rank's part of the ids
    head        with a vocabulary split by tp: runs as under tp, on this rank's tokens
If the tokens of a call do not divide, the layer runs whole, on every rank alike.

Under tp too, cp is outside. The tokens of one rank are a whole for the ranks of tp, which divide
the layer's weights and, between layers, these tokens once more. The graph has the collectives of
both.

A value that a graph takes or returns whole has a whole gradient inside
(`spmd/autograd_collectives.py`) and summands of one outside (`token_shard.py`). So inputs go
through `count_gradient_once`, and outputs through `enter`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.base.errors import PlanError
from shoal.parallel._torch import pytree
from shoal.parallel.context_parallel.token_shard import wrap_tokens
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.autograd_collectives import Axis, count_gradient_once
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Split
from shoal.parallel.spmd.sequence_shards import (
    ShardSpec,
    gather_if_shard,
    is_shard,
    local_part_of,
    wrap_output,
)
from shoal.parallel.spmd.split_block import BlockSplit
from shoal.parallel.spmd.split_forward import ProgramCache, SplitForward, count_partial_once
from shoal.trace.isolation.replaced_forward import ReplacedForward


class ContextPrograms(ProgramCache):
    """Graphs of a class of equal layers; no graph for inputs whose tokens do not divide.

    Args:
        notices: receives a line if a call could not be divided.
    """

    def __init__(self, split: BlockSplit, bare: nn.Module, notices: list[str]) -> None:
        super().__init__(split, bare)
        self.notices = notices
        self.whole: set[Hashable] = set()

    def get_program(
        self, kind: Hashable, name: str, block: nn.Module, leaves: list[Any], structure: Any
    ) -> BlockSplit | None:
        """Return the split graph for a kind of inputs, made at first use; None: run it unsplit.

        Args:
            kind: key of the inputs from `BlockInternals.kind`.
            name, block: the layer.
            leaves, structure: its inputs, flattened by pytree.

        Returns:
            None if the tokens do not divide over the ranks; `notices` then gets a line.
        """
        if kind in self.whole:
            return None
        if kind not in self.known:
            try:
                self.known[kind] = self.make_program(name, block, leaves, structure)
            except PlanError:
                self.whole.add(kind)
                shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
                self.notices.append(
                    f"layout.cp = {self.first.degree}: {name} runs whole on every rank for inputs "
                    f"{shapes}, which do not divide as the sample's did"
                )
                return None
        return self.known[kind]


class ContextForward(SplitForward):
    """Replacement of a layer's forward that runs its split graph on this rank's tokens.

    Args:
        tensor: the ranks over which tp divides the part of each rank of `axis`; None without tp.
    """

    programs: ContextPrograms

    shared_attributes = (*SplitForward.shared_attributes, "tensor")

    def __init__(
        self,
        name: str,
        block: nn.Module,
        programs: ContextPrograms,
        axis: Axis,
        tensor: Axis | None = None,
    ) -> None:
        self.tensor = tensor
        super().__init__(name, block, programs, axis)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the results of the layer's own forward, with tokens in shards."""
        leaves, structure = pytree.tree_flatten((inputs, named), is_leaf=is_shard)
        kind = self.insides.kind(leaves, structure)
        split = self.programs.get_program(kind, self.name, self.block, leaves, structure)
        if split is None:
            args, kwargs = pytree.tree_unflatten(
                [gather_if_shard(leaf) for leaf in leaves], structure
            )
            return self.forward(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inside = split.inner.inputs if split.inner is not None else (WHOLE,) * len(tensors)
        flat = [
            self._convert_tensor_input(self._convert_input(value, label), its)
            for value, label, its in zip(tensors, split.inputs, inside, strict=True)
        ]
        held = [self._read_parameter(name, split) for name in split.shapes]
        held += [self.insides.tensor(name) for name in split.buffers]
        outputs = self._run_program(split, [*held, *flat])
        labelled = zip(outputs, split.outputs, strict=True)
        return split.rebuild([self._convert_output(value, label) for value, label in labelled])

    def _run_program(self, split: BlockSplit, given: list[Tensor]) -> Sequence[Tensor]:
        """Return the graph's results, as a rank of `axis` has them."""
        code = self.programs.compiled_program(split)
        if split.inner is None or self.tensor is None:
            return code(self.axis, *given)
        both = code(self.axis, self.tensor, *given)
        labelled = zip(both, split.inner.outputs, strict=True)
        return [wrap_output(value, label, self.tensor) for value, label in labelled]

    def _read_parameter(self, name: str, split: BlockSplit) -> Tensor:
        """Return a parameter whose gradient on this rank is a summand over the ranks."""
        value = self.insides.tensor(name)
        if split.inner is not None and self.tensor is not None:
            value = count_partial_once(name, value, split.inner, self.tensor)
        return count_partial_once(name, value, split, self.axis)

    def _convert_tensor_input(self, value: Tensor, label: Label) -> Tensor:
        if isinstance(label, Split) and self.tensor is not None:
            return local_part_of(
                value, ShardSpec.split_evenly(self.tensor, label.dim, value.shape[label.dim])
            )
        return gather_if_shard(value)

    def _convert_input(self, value: Tensor, label: Label) -> Tensor:
        if isinstance(label, Split):
            length = value.shape[label.dim]
            return local_part_of(
                value, ShardSpec.split_evenly(self.axis, label.dim, length, summands=True)
            )
        return count_gradient_once(gather_if_shard(value), self.axis)

    def _convert_output(self, value: Tensor, label: Label) -> Tensor:
        if isinstance(label, Split):
            return wrap_tokens(value, self.axis, label.dim, value.shape[label.dim] * self.axis.size)
        return autograd_collectives.enter(value, self.axis) if value.is_floating_point() else value


class _TokenForward(ReplacedForward):
    """Replaced forward that calls the forward before it with this rank's tokens."""

    shared_attributes = ("axis",)

    def __init__(self, name: str, block: nn.Module, axis: Axis) -> None:
        self.axis = axis
        super().__init__(name, block)


class ContextHead(_TokenForward):
    """Output head on this rank's tokens: [batch, tokens, dim] to [batch, tokens, classes]."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map this rank's hidden states as nn.Linear does."""
        dim = hidden.dim() - 2
        if dim < 1 or hidden.shape[dim] % self.axis.size:
            return self.forward(gather_if_shard(hidden))
        deal = ShardSpec.split_evenly(self.axis, dim, hidden.shape[dim], summands=True)
        return wrap_tokens(
            self.forward(local_part_of(hidden, deal)), self.axis, dim, hidden.shape[dim]
        )


class ContextEmbedding(_TokenForward):
    """Embedding lookup of this rank's part of the ids, cut along their last dim."""

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up ids [..., tokens] as [..., tokens, dim]."""
        length = ids.shape[-1] if ids.dim() else 0
        if length < self.axis.size:
            return self.forward(ids)
        deal = ShardSpec.split_evenly(self.axis, ids.dim() - 1, length, summands=True)
        rows = self.forward(local_part_of(ids, deal))  # the whole table, or tp's split lookup
        return wrap_tokens(rows, self.axis, deal.dim, length)
