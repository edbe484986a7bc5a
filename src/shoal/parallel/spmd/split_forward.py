"""Run a block as its split graph, instead of its own forward.

Protocol  first call with a kind of input (shapes, formats, values of non-tensor arguments, training
          or not): the graph is made, from a copy of the block that shows whole shapes.
          every call: inputs become what the graph takes (whole, or this rank's part of the
          sequence), the block's parameters and buffers are looked up anew (a layout may swap
          them), and results that are parts are wrapped as shards (`sequence_shards.py`).
Equal blocks share their graphs: a graph holds no numbers of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shoal.parallel._torch import function_modes, pytree
from shoal.parallel.spmd.autograd_collectives import Axis, count_gradient_once
from shoal.parallel.spmd.labelling.labels import Label, Split
from shoal.parallel.spmd.sequence_shards import (
    ShardSpec,
    gather_if_shard,
    is_shard,
    local_part_of,
    wrap_output,
)
from shoal.parallel.spmd.split_block import BlockSplit
from shoal.trace.isolation.equal_layers import OF_TORCH, PLAIN
from shoal.trace.isolation.replaced_forward import ReplacedForward


class BlockInternals:
    """Tensors and modes of a block, looked up at each use because a layout may swap them."""

    def __init__(self, block: nn.Module) -> None:
        self.parts = tuple(block.modules())
        self.homes = {
            f"{path}.{key}" if path else key: (part, key)
            for path, part in block.named_modules()
            for key in (*part._parameters, *part._buffers)
        }
        self.parameters = tuple(
            (part, key)
            for part in self.parts
            for key, p in part._parameters.items()
            if p is not None
        )
        self.attributes = tuple(
            (part, key, value, getattr(value, "_version", 0))
            for part in self.parts
            for key, value in vars(part).items()
            if key not in OF_TORCH and isinstance(value, (*PLAIN, Tensor))
        )

    def tensor(self, name: str) -> Tensor:
        """Return the block's present parameter or buffer of a dotted name."""
        return getattr(*self.homes[name])

    def kind(self, leaves: list[Any], structure: Any) -> Hashable:
        """Return a key for all that a traced graph depends on: shapes, dtypes, modes, …."""
        told = tuple(
            (leaf.shape, leaf.dtype, leaf.device)
            if isinstance(leaf, Tensor)
            else _argument_key(leaf)
            for leaf in leaves
        )
        modes = tuple(part.training for part in self.parts)
        formats = tuple(getattr(part, key).dtype for part, key in self.parameters)
        changed = tuple(  # a graph has them as constants
            (place, _argument_key(now))
            for place, (part, key, was, version) in enumerate(self.attributes)
            if (now := vars(part).get(key)) is not was or getattr(now, "_version", 0) != version
        )
        return structure, told, modes, formats, changed, tuple(map(type, function_modes()))


class ProgramCache:
    """Graphs of a class of equal blocks, one for each kind of input."""

    def __init__(self, split: BlockSplit, bare: nn.Module) -> None:
        self.first, self.bare = split, bare
        self.known: dict[Hashable, BlockSplit] = {}
        self.compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        self.compiled: dict[int, Callable[..., Any]] = {}

    def register_sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Register the first graph for the sample's kind of input."""
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_shard)
        self.known[BlockInternals(self.bare).kind(leaves, structure)] = self.first

    def compiled_program(self, split: BlockSplit) -> Callable[..., Any]:
        """Return the callable of a graph: the graph, or code compiled between collectives."""
        if self.compiler is None:
            return split.run
        if id(split) not in self.compiled:
            from shoal.parallel.spmd.other_programs import prepare_for_compiler

            self.compiled[id(split)] = self.compiler(prepare_for_compiler(split.run).forward)
        return self.compiled[id(split)]

    def make_program(
        self, name: str, block: nn.Module, leaves: list[Any], structure: Any
    ) -> BlockSplit:
        """Make the graph for another kind of input.

        Raises:
            PlanError: the cut parameters cannot serve these inputs.
        """
        from shoal.parallel.spmd.other_programs import (
            make_split_for_inputs,  # the sample's kind needs none
        )

        return make_split_for_inputs(self.first, self.bare, name, block, leaves, structure)


class SplitForward(ReplacedForward):
    """Replacement of a block's forward that runs its split graph."""

    shared_attributes: tuple[str, ...] = ("axis", "programs")

    def __init__(self, name: str, block: nn.Module, programs: ProgramCache, axis: Axis) -> None:
        self.programs, self.axis = programs, axis
        self.insides = BlockInternals(block)
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the results of the block's forward: full tensors, or shards of them."""
        leaves, structure = pytree.tree_flatten((inputs, named), is_leaf=is_shard)
        kind, known = self.insides.kind(leaves, structure), self.programs.known
        if kind not in known:
            known[kind] = self.programs.make_program(self.name, self.block, leaves, structure)
        split = known[kind]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        flat = [
            self._convert_input(value, label)
            for value, label in zip(tensors, split.inputs, strict=True)
        ]
        held = [
            count_partial_once(name, self.insides.tensor(name), split, self.axis)
            for name in split.shapes
        ]
        held += [self.insides.tensor(name) for name in split.buffers]
        outputs = self.programs.compiled_program(split)(self.axis, *held, *flat)
        for name in split.written:  # seen by what watches buffers that forward passes change
            increment_version(self.insides.tensor(name))
        return split.rebuild(
            [
                wrap_output(value, label, self.axis)
                for value, label in zip(outputs, split.outputs, strict=True)
            ]
        )

    def compile_inside(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Compile the graphs, which all equal layers share."""
        self.programs.compiler = compiler
        return True

    def restore(self) -> None:
        """Restore the layer's own forward and drop the compiled graphs."""
        self.programs.compiler = None
        super().restore()

    def _convert_input(self, value: Tensor, label: Label) -> Tensor:
        if isinstance(label, Split):
            return local_part_of(
                value, ShardSpec.split_evenly(self.axis, label.dim, value.shape[label.dim])
            )
        return gather_if_shard(value)


def count_partial_once(name: str, value: Tensor, split: BlockSplit, axis: Axis) -> Tensor:
    """Return a parameter as a graph reads it, with its gradient counted once in the ranks' sum."""
    if name not in split.summed or name in split.partial:
        return value
    return count_gradient_once(value, axis)


def _argument_key(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    from shoal.trace.isolation.argument_keys import (
        object_key,  # few layers receive other arguments, or keep tensors
    )

    return object_key(value)
