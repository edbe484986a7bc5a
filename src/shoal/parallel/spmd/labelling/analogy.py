"""Carries the labels of a traced layer over to the same layer on longer or shorter sequences.

Labels do not depend on how many tokens there are. Finding rules means running operations, which
for a long sequence takes memory that no rank may have; so a layer is solved on a few tokens, and
its graph for more of them takes over what was found, operation by operation. That holds if the
graphs differ in sizes only, and in those only that are the number of tokens or multiples of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import Label, Split, Tiled, divides
from shoal.parallel.spmd.labelling.problem import Problem


def carried_over(known: Labelling, problem: Problem) -> Labelling | None:
    """The labels of `known` for another length; None where the graphs are not alike otherwise."""
    dim = problem.sequence_dim
    before, after = (_tokens(one, dim) for one in (known.problem, problem))
    if not before or not after or after % problem.degree:
        return None
    old, new = (list(one.traced.graph.nodes) for one in (known.problem, problem))
    if len(old) != len(new):
        return None
    twins = dict(zip(old, new, strict=True))
    for one, twin in twins.items():
        if (one.op, _target(one)) != (twin.op, _target(twin)):
            return None
        if [twins[n] for n in one.all_input_nodes] != twin.all_input_nodes:
            return None
        if not _sizes_follow(_shapes(one), _shapes(twin), before, after):
            return None
        if one in known.labels and not _fits(known.labels[one], _shapes(twin), problem.degree):
            return None
    return known.carried(problem, twins)


def _tokens(problem: Problem, dim: int | None) -> int:
    """The length of the first floating input along the dim of tokens; 0 if there is none."""
    for node in problem.inputs:
        value = node.meta["val"]
        if dim is not None and value.is_floating_point() and value.dim() > dim:
            return int(value.shape[dim])
    return 0


def _target(node: fx.Node) -> Any:
    """What is called; names of placeholders and constants may differ."""
    return node.target if node.op == "call_function" else ""


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]


def _sizes_follow(
    old: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]], before: int, after: int
) -> bool:
    if [len(shape) for shape in old] != [len(shape) for shape in new]:
        return False
    pairs = [p for one, other in zip(old, new, strict=True) for p in zip(one, other, strict=True)]
    return all(n == m or (n % before == 0 and m == n // before * after) for n, m in pairs)


def _fits(label: Any, shapes: Sequence[tuple[int, ...]], degree: int) -> bool:
    """Whether values of these shapes can be cut as the label, or each of several, says."""
    labels: Sequence[Label] = label if isinstance(label, tuple) else [label] * len(shapes)
    if any(isinstance(one, Tiled) for one in labels):
        return False
    return all(
        not isinstance(one, Split) or divides(shape[one.dim], one.groups, degree)
        for one, shape in zip(labels, shapes, strict=False)
    )
