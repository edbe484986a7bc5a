"""Other programs of a split layer than the sample's: for other inputs, and for a compiler.

The last micro-batch of an epoch is shorter, that of an evaluation longer, or a flag has changed.
The parameters stay cut as they are; a copy of the layer without numbers shows their whole shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.base.errors import PlanError
from shoal.parallel._torch import disable_modes_and_hooks, pytree
from shoal.parallel.spmd.labelling.operation_terms import IndivisibleSequence
from shoal.parallel.spmd.sequence_shards import is_shard
from shoal.parallel.spmd.split_block import BlockSplit, split_for_inputs
from shoal.trace.graph.layer_graph import UntraceableLayer
from shoal.trace.isolation.equal_layers import OF_TORCH, PLAIN


def make_split_for_inputs(
    first: BlockSplit, bare: nn.Module, name: str, block: nn.Module, leaves: list[Any], tree: Any
) -> BlockSplit:
    """Make the split graph for the flat arguments of a call, whose structure is `tree`.

    Args:
        first: split for the sample's kind of input.
        bare: the copy of the layer without numbers.

    Raises:
        PlanError: the cut parameters cannot serve these inputs, or the layer is not traceable with
            them.
    """
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        from shoal.trace.isolation.argument_keys import describe_holder  # few models pass objects

        if why := max(map(describe_holder, leaves)):
            raise PlanError(f"{name}: unlike in the sample, {why}; try: the tensors themselves")
    wholes = [_make_whole_like(leaf) if is_shard(leaf) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(wholes, tree)
    try:
        # This may run inside a forward pass under another dispatch mode.
        with disable_modes_and_hooks(), _match_modes(bare, block):
            try:
                return split_for_inputs(first, bare, args, kwargs)
            except IndivisibleSequence:  # a sequence that does not divide: whole inputs and outputs
                if not first.parameters:
                    raise  # nothing else was split
                return split_for_inputs(replace(first, sequence_dim=None), bare, args, kwargs)
    except (UntraceableLayer, IndivisibleSequence) as failure:
        raise PlanError(
            f"{name}: cannot be split over layout.tp = {first.degree} for this input, "
            f"unlike the first one: {failure}; try: layout.tp=1"
        ) from failure


def prepare_for_compiler(run: fx.GraphModule) -> fx.GraphModule:
    """Return the same program for a compiler, which compiles the code between collectives.

    Collectives, shared attention and a user's autograd functions are Python; the compiler skips
    them.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(run.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, FunctionType):
            node.target = _disable_compile(node.target)
    return fx.GraphModule(run, graph)


def _disable_compile(function: FunctionType) -> Callable[..., Any]:
    """Return a function that the compiler skips, with a name that generated code can use."""
    left: Any = torch.compiler.disable(function)
    left.__name__ = left.__qualname__ = function.__name__
    left.__module__ = function.__module__
    return left


def _make_whole_like(shard: Tensor) -> Tensor:
    """Return a tensor of the full shape; its values do not matter."""
    shape, dtype, device = shard.shape, shard.dtype, shard.device
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=shard.requires_grad)


@contextmanager
def _match_modes(bare: nn.Module, block: nn.Module) -> Iterator[None]:
    """Give the copy the block's modes, dtypes and plain attributes while the context is open."""
    for copied, own in zip(bare.modules(), block.modules(), strict=True):
        copied.training = own.training
        plain = {k: v for k, v in vars(own).items() if isinstance(v, (*PLAIN, Tensor))}
        vars(copied).update((key, value) for key, value in plain.items() if key not in OF_TORCH)
    own_tensors = (*block.parameters(), *block.buffers())
    for shown, own_tensor in zip((*bare.parameters(), *bare.buffers()), own_tensors, strict=True):
        if isinstance(shown, nn.Parameter):  # the block's own may be a narrow cast of one
            number = torch.zeros((), dtype=own_tensor.dtype, device=own_tensor.device)
            shown.data = number.expand(shown.shape)
        else:
            shown.data = own_tensor.detach().clone()
    yield
