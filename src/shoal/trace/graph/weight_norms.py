"""Rewrite operations on weights alone, so that each rank can compute them on its parts.

    unit matrix × weight       → the weight, transposed (its product needs all columns of both)
    norm that is detached      → root of the sum of squares: of parts, a sum over ranks

DoRA (2402.09353) applies its adapter to a unit matrix and divides by the norms of the summed rows.
With these rewrites it is cut as the layer that it adapts. A norm through which a gradient flows
stays as it is: at 0 the root's gradient is infinite, the norm's is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

NORMS = (aten.linalg_vector_norm.default, aten.linalg_norm.default)
NARROW = (torch.float16, torch.bfloat16)


def rewrite_weight_norms(graph: fx.Graph) -> None:
    """Rewrite unit-matrix products and detached norms of weights in a traced layer, in place."""
    for node in list(graph.nodes):
        if node.target is aten.linear.default and _is_unit(node.args[0]) and len(node.args) == 2:
            with graph.inserting_before(node):
                _replace_node(graph, node, _add_node(graph, aten.t.default, (node.args[1],)))
        elif node.target in NORMS and _is_detached_root(node):
            _write_norm(graph, node)


def _is_unit(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.eye.default


def _is_detached_root(node: fx.Node) -> bool:
    """Return whether a node is a 2-norm along some dims that needs no gradient."""
    users = list(node.users)
    while users and all(user.target is aten.to.dtype for user in users):
        users = [further for user in users for further in user.users]
    given = dict(node.kwargs)
    order = node.args[1] if len(node.args) > 1 else given.pop("ord", 2)
    detached = bool(users) and all(user.target is aten.detach.default for user in users)
    along = (len(node.args) > 2 and node.args[2] is not None) or given.pop("dim", None) is not None
    return detached and along and order in (None, 2) and given.keys() <= {"keepdim"}


def _write_norm(graph: fx.Graph, node: fx.Node) -> None:
    value: Any = node.args[0]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs["dim"]
    keeps = node.args[3] if len(node.args) > 3 else node.kwargs.get("keepdim", False)
    kind = value.meta["val"].dtype
    with graph.inserting_before(node):
        if kind in NARROW:  # as torch's norm computes inside
            value = _add_node(graph, aten.to.dtype, (value, torch.float32))
        squares = _add_node(graph, aten.square.default, (value,))
        total = _add_node(graph, aten.sum.dim_IntList, (squares, dim, keeps))
        root = _add_node(graph, aten.sqrt.default, (total,))
        if kind in NARROW:
            root = _add_node(graph, aten.to.dtype, (root, kind))
    _replace_node(graph, node, root)


def _replace_node(graph: fx.Graph, node: fx.Node, made: fx.Node) -> None:
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _add_node(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Add an operation to the graph, with its result's shape."""
    node = graph.call_function(target, args)
    known = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = target(*known)
    return node
