"""Labelling problem: the traced layer, its calls, and the values that come from parameters only.

Values that depend on parameters and constants alone (a transposed weight, −exp of a decay rate)
count as weights: their labels follow from those of the parameters.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.experiment import ArgumentSlot, OperationCall, OperationInput
from shoal.parallel.spmd.labelling.node_arguments import as_float64
from shoal.parallel.spmd.labelling.rules import RuleCache
from shoal.trace.graph.layer_graph import LayerGraph, is_in_place, is_opaque, list_replaceable_nodes


class LabellingProblem:
    """Traced layer, prepared for labelling over `degree` ranks.

    Attributes:
        sequence_dim: sequence dim of the first floating input, under sequence parallelism.
        shares: whether the labelled ranks may compute shared attention together.
        averages: whether a mean over a split dim may become a sum over ranks (norms over all
            heads).
    """

    def __init__(
        self,
        traced: LayerGraph,
        rules: RuleCache,
        degree: int,
        sequence_dim: int | None = None,
        *,
        shares: bool = True,
    ) -> None:
        self.traced, self.rules, self.degree, self.shares = traced, rules, degree, shares
        self.sequence_dim, self.averages = sequence_dim, True
        placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        count, after = len(traced.parameters), len(traced.parameters) + len(traced.buffers)
        self.parameters = dict(zip(placeholders[:count], traced.parameters, strict=True))
        self.by_name = {name: node for node, name in self.parameters.items()}
        self.buffers = dict(zip(placeholders[count:after], traced.buffers, strict=True))
        self.inputs = placeholders[after:]
        self.sources: dict[fx.Node, set[str]] = {}
        for node in traced.graph.nodes:
            self.sources[node] = self._sources(node)
        self.replaceable = list_replaceable_nodes(traced.graph)
        self._slots: dict[fx.Node, list[fx.Node]] = {}
        self._calls: dict[fx.Node, OperationCall] = {}
        self._known: dict[fx.Node, Any] = {}

    def _sources(self, node: fx.Node) -> set[str]:
        """Return names of the parameters that make a weight; empty for all other values."""
        if node in self.parameters:
            return {self.parameters[node]}
        if node.op != "call_function" or not isinstance(_value(node), Tensor | tuple | list):
            return set()
        found: set[str] = set()
        for one in node.all_input_nodes:
            if not self.is_constant(one) and not self.sources.get(one):
                return set()
            found |= self.sources.get(one, set())
        return found

    def is_constant(self, node: fx.Node) -> bool:
        """Return whether a node depends on no parameter, buffer or input."""
        if node.op == "get_attr":
            return True
        if node.op != "call_function":
            return False
        return all(self.is_constant(one) for one in node.all_input_nodes)

    def input_nodes(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that an operation reads, one entry for each argument position."""
        if node not in self._slots:  # cached: an eighth of the search's time without it
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            self._slots[node] = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        return self._slots[node]

    def call(self, node: fx.Node) -> OperationCall:
        """Return the node's operation as a `OperationCall`, the form in which rules run it."""
        if node not in self._calls:
            slots = self.input_nodes(node)
            places = iter(range(len(slots)))

            def described(leaf: Any) -> Any:
                return ArgumentSlot(next(places)) if isinstance(leaf, fx.Node) else as_float64(leaf)

            template = pytree.tree_map(described, (list(node.args), dict(node.kwargs)))
            target = node.target
            if is_opaque(target):
                target = target.reference  # type: ignore[union-attr]
            if target is torch.ops.aten.view.default:  # parts may lie in memory in another way
                target = torch.ops.aten.reshape.default
            self._calls[node] = OperationCall(
                target,
                repr(template),
                template,
                tuple(self._describe_value(n) for n in slots),
                frozenset(k for k, n in enumerate(slots) if n in self.buffers),
            )
        return self._calls[node]

    def _describe_value(self, node: fx.Node) -> OperationInput:
        like = _value(node)
        shape = tuple(like.shape)
        if like.dtype.is_floating_point or like.dtype.is_complex:
            return OperationInput(shape, like.dtype)
        known = self._evaluate(node).detach().cpu().contiguous()
        raw = known.reshape(-1).view(torch.uint8).numpy().tobytes()
        return OperationInput(shape, like.dtype, known, hashlib.blake2b(raw).digest())

    def _evaluate(self, node: fx.Node) -> Any:
        """Return the sample's value of an integer or boolean; floats it needs are random."""
        if node in self._known:
            return self._known[node]
        made: Any
        if node in self.buffers:
            made = self.traced.buffers[self.buffers[node]]
        elif node in self.inputs:
            made = self.traced.inputs[self.inputs.index(node)]
        elif node.op == "get_attr":
            made = getattr(self.traced.module, str(node.target))
        elif node in self.parameters:
            made = _value(node)
        else:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda one: self._evaluate(one)
            )
            writes = is_in_place(node)
            args = pytree.tree_map_only(Tensor, lambda t: t.clone() if writes else t, args)
            with torch.no_grad():
                made = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(made, Tensor) and made.is_floating_point() and node.op == "placeholder":
            generator = torch.Generator().manual_seed(len(self._known))
            made = torch.randn(made.shape, dtype=torch.float64, generator=generator).to(made.dtype)
        self._known[node] = made
        return made

    def size(self, node: fx.Node) -> int:
        """Return the number of elements of a tensor."""
        return int(_value(node).numel())


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node picks one of several results."""
    return node.target is operator.getitem


def parameter_shapes(problem: LabellingProblem) -> Mapping[str, tuple[int, ...]]:
    """Return the unsplit shapes of the parameters, by name."""
    return {name: tuple(_value(node).shape) for node, name in problem.parameters.items()}
