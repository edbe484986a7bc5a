"""Transfer the labels of a traced layer to the same layer at another sequence length.

Labels do not depend on the number of tokens. To find rules, Shoal runs operations, which for a long
sequence takes more memory than a rank may have. So Shoal solves a layer on a few tokens, and the
graph for more tokens copies the labels, operation by operation. That holds if the graphs differ
only in sizes that are the number of tokens or a multiple of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import Label, Split, Tiled, divides
from shoal.parallel.spmd.labelling.problem import LabellingProblem


def transfer_labels(known: Labelling, problem: LabellingProblem) -> Labelling | None:
    """Copy the labels of `known` to another length; None if the graphs differ otherwise."""
    dim = problem.sequence_dim
    before, after = (_count_tokens(one, dim) for one in (known.problem, problem))
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
        if not _sizes_scale(_shapes(one), _shapes(twin), before, after):
            return None
        if one in known.labels and not _fits(known.labels[one], _shapes(twin), problem.degree):
            return None
    return known.transfer_to(problem, twins)


def _count_tokens(problem: LabellingProblem, dim: int | None) -> int:
    """Return the length of the first floating input along the token dim; 0 if there is none."""
    for node in problem.inputs:
        value = node.meta["val"]
        if dim is not None and value.is_floating_point() and value.dim() > dim:
            return int(value.shape[dim])
    return 0


def _target(node: fx.Node) -> Any:
    """Return the called function; the names of placeholders and constants may differ."""
    return node.target if node.op == "call_function" else ""


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]


def _sizes_scale(
    old: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]], before: int, after: int
) -> bool:
    if [len(shape) for shape in old] != [len(shape) for shape in new]:
        return False
    pairs = [p for one, other in zip(old, new, strict=True) for p in zip(one, other, strict=True)]
    return all(n == m or (n % before == 0 and m == n // before * after) for n, m in pairs)


def _fits(label: Any, shapes: Sequence[tuple[int, ...]], degree: int) -> bool:
    """Return whether values of these shapes can be cut as the label, or each label, says."""
    labels: Sequence[Label] = label if isinstance(label, tuple) else [label] * len(shapes)
    if any(isinstance(one, Tiled) for one in labels):
        return False
    return all(
        not isinstance(one, Split) or divides(shape[one.dim], one.groups, degree)
        for one, shape in zip(labels, shapes, strict=False)
    )
