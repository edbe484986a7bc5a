"""Choose the labels of an opaque part's parameters, all at once, by running the part.

    whole inputs × parameters cut alike   → a sum over ranks

In a layer of experts, these are the rows of every expert's first matrix (two segments: gate and up)
and the columns of its second. The dims are not known beforehand, so all are tried; assignments that
leave the fewest elements whole come first. Rank 0 alone passes a bias that all ranks would add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.candidates import Shape
from shoal.parallel.spmd.labelling.labels import (
    PARTIAL,
    WHOLE,
    Label,
    Split,
    count_segments,
    divides,
)
from shoal.parallel.spmd.labelling.operation_terms import OperationStep, WeightChoice
from shoal.parallel.spmd.labelling.rules import LabelRule
from shoal.parallel.spmd.labelling.weight_cuts import WeightLabelling, resolve_slot_labels
from shoal.trace.graph.layer_graph import UntraceableLayer

SEGMENTS = (1, 2)
"""Numbers of segments tried: one, or two (gate and up)."""

MOST_PARAMETERS = 6
"""Largest number of parameters; a part with more is split by its children."""


def choose_parameter_labels(
    labelling: WeightLabelling, node: fx.Node, values: list[Any], undecided: Mapping[str, Shape]
) -> OperationStep | None:
    """Choose labels of all parameters of an opaque part by trials; None: leave them replicated.

    Args:
        values, undecided: as for `weight_cuts.choose_parameter_labels`.
    """
    slots = labelling.problem.input_nodes(node)
    wants = [
        WHOLE if label is not None and labelling.is_gathered_anyway(one) else label
        for one, label in zip(slots, values, strict=True)
    ]
    if any(label not in (None, WHOLE) for label in wants) or len(undecided) > MOST_PARAMETERS:
        return None
    for given in _enumerate_assignments(undecided, labelling.choices, labelling.problem.degree):
        step = _try_assignment(labelling, slots, node, wants, given)
        if step is not None:
            cut = {name: label or WHOLE for name, label in given.items()}
            labelling.parameters.update(cut)
            for name, label in given.items():
                if label != WHOLE:
                    labelling.roles[name] = "once" if label is None else "with its part"
            return step
    return None


def _enumerate_assignments(
    shapes: Mapping[str, Shape], choices: Mapping[str, WeightChoice], degree: int
) -> Iterator[dict[str, Label | None]]:
    """Yield labels to try, fewest replicated elements first; None: passed by rank 0 alone."""
    most = max(len(shape) for shape in shapes.values())
    stacked = most > 2 and len({shape[0] for shape in shapes.values() if len(shape)}) == 1
    options: list[list[Label | None]] = []
    for name, shape in shapes.items():
        splits: list[Label | None] = [
            Split(d, g)
            for g in SEGMENTS
            for d in range(int(stacked), len(shape))
            if divides(shape[d], g, degree)
        ]
        if choices.get(name, WeightChoice()).kind == "whole":
            splits = []
        beside: list[Label | None] = [None, WHOLE] if len(shape) < most else []
        options.append([*splits, *beside] or [WHOLE])  # a whole matrix makes a whole product

    def dear(labels: tuple[Label | None, ...]) -> tuple[int, int]:
        pairs = list(zip(labels, shapes.values(), strict=True))
        left = sum(math.prod(shape) for label, shape in pairs if not isinstance(label, Split))
        return left, sum(
            count_segments(label.groups) for label, _ in pairs if isinstance(label, Split)
        )

    for labels in sorted(itertools.product(*options), key=dear):
        if any(isinstance(label, Split) for label in labels):
            yield dict(zip(shapes, labels, strict=True))


def _try_assignment(
    labelling: WeightLabelling,
    slots: list[fx.Node],
    node: fx.Node,
    values: list[Any],
    given: Mapping[str, Label | None],
) -> OperationStep | None:
    """Return the step with these labels if the ranks' results add up to the full results."""
    if (asked := resolve_slot_labels(labelling, slots, values, given)) is None:
        return None
    wants, once = asked
    rule = labelling.rule_for(node, wants, once)
    return (
        OperationStep(tuple(wants), rule, once)
        if rule is not None and _adds_up(node, rule)
        else None
    )


def _adds_up(node: fx.Node, rule: LabelRule) -> bool:
    """Return whether all floating results are partial sums; others would get full gradients."""
    results = pytree.tree_leaves(node.meta["val"])
    outs = rule.out if isinstance(rule.out, tuple) else (rule.out,) * len(results)
    return all(
        out == PARTIAL for one, out in zip(results, outs, strict=True) if one.is_floating_point()
    )


def check_split(parts: Iterable[str], labels: Mapping[str, Label]) -> None:
    """Raise Untraceable unless the layer's labels split each of its opaque parts.

    Args:
        parts: names of the opaque parts in the layer.
        labels: labels of the layer's parameters.

    Raises:
        Untraceable: the layer is better split by its children.
    """
    for part in parts:
        inside = [label for name, label in labels.items() if name.startswith(f"{part}.")]
        if all(label == WHOLE for label in inside):
            raise UntraceableLayer(
                f"{part} hangs on numbers, and cut parameters do not make up a sum"
            )
