"""Choose how the weights of one operation are cut, where they meet their first activation.

    whole activation × weight cut along its outputs   → split result       (column)
    split activation × weight cut along its inputs    → sum over ranks     (row)
    split activation × weight cut alike               → split result       (bias, per-channel scale)

The meaning of the dims is not known beforehand: every dim is tried, and `rules.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from shoal.parallel.spmd.labelling.candidates import (
    Shape,
    enumerate_assignments,
    enumerate_part_labels,
)
from shoal.parallel.spmd.labelling.labels import PARTIAL, WHOLE, Label, Split, Tiled
from shoal.parallel.spmd.labelling.operation_terms import OperationStep, WeightChoice
from shoal.parallel.spmd.labelling.problem import LabellingProblem
from shoal.parallel.spmd.labelling.rules import LabelRule


class WeightLabelling(Protocol):
    """Attempt to label a layer (`label_graph.py`), as far as weights are concerned."""

    problem: LabellingProblem
    choices: Mapping[str, WeightChoice]
    parameters: dict[str, Label]
    roles: dict[str, str]

    def weight(self, node: fx.Node, given: Mapping[str, Label]) -> Any:
        """Return the label of a value made of parameters alone, from labels of the parameters."""

    def rule_for(
        self, node: fx.Node, wants: Sequence[Label], once: frozenset[int] = frozenset()
    ) -> LabelRule | None:
        """Return the operation's rule for inputs with these labels; None: there is none."""

    def is_gathered_anyway(self, node: fx.Node) -> bool:
        """Return whether gathering this value costs little."""


def choose_parameter_labels(
    labelling: WeightLabelling, node: fx.Node, values: list[Any], undecided: Mapping[str, Shape]
) -> OperationStep | None:
    """Choose labels of an operation's undecided weights by trials; None: leave them replicated.

    Args:
        labelling: receives the chosen labels.
        node: the operation.
        values: labels of the operation's tensors, None for weights.
        undecided: shapes of the undecided parameters, by name.

    Returns:
        the operation's step with these labels.
    """
    matrices = {name: shape for name, shape in undecided.items() if len(shape) > 1}
    vectors = {name: shape for name, shape in undecided.items() if len(shape) <= 1}
    choice = (
        labelling.choices.get(next(iter(matrices)), WeightChoice()) if matrices else WeightChoice()
    )
    if choice.kind == "whole":
        return None
    degree = labelling.problem.degree
    for met in _enumerate_activation_labels(labelling, node, values, choice, bool(matrices)):
        for given in enumerate_assignments(matrices, vectors, met, choice.groups, degree):
            step = _try_labels(labelling, node, met, given)
            if step is not None:
                return step
    return None


def _enumerate_activation_labels(
    labelling: WeightLabelling, node: fx.Node, values: list[Any], choice: WeightChoice, matrix: bool
) -> Iterator[list[Any]]:
    """Yield labels under which a weight may meet the other inputs: as row, then as column."""
    slots = labelling.problem.input_nodes(node)
    if any(isinstance(label, Split | Tiled) for label in values) and choice.kind != "column":
        yield values
    free = choice.kind == "column"
    gathered = [
        WHOLE if label is not None and (free or labelling.is_gathered_anyway(one)) else label
        for one, label in zip(slots, values, strict=True)
    ]
    if choice.kind == "row":
        for k, label in enumerate(gathered):
            shape = tuple(slots[k].meta["val"].shape)
            for part in enumerate_part_labels(shape, [], labelling.problem.degree):
                if label == WHOLE:
                    yield [*gathered[:k], part, *gathered[k + 1 :]]
    elif matrix:
        yield gathered


def resolve_slot_labels(
    labelling: WeightLabelling,
    slots: list[fx.Node],
    values: list[Any],
    given: Mapping[str, Label | None],
) -> tuple[list[Label], frozenset[int]] | None:
    """Return labels of an operation's slots, and the slots that rank 0 alone fills.

    Args:
        values: labels that are settled; None: the slot comes from parameters.
        given: labels of parameters; None: rank 0 alone passes the parameter.

    Returns:
        None if a slot comes from parameters that these labels do not decide.
    """
    sources = labelling.problem.sources
    labels = {name: label or WHOLE for name, label in given.items()}
    alone = {name for name, label in given.items() if label is None}
    wants: list[Label] = []
    for one, label in zip(slots, values, strict=True):
        found = labelling.weight(one, labels) if label is None else label
        if found is None:
            return None
        wants.append(found)
    return wants, frozenset(k for k, one in enumerate(slots) if sources[one] & alone)


def _try_labels(
    labelling: WeightLabelling, node: fx.Node, values: list[Any], given: Mapping[str, Label | None]
) -> OperationStep | None:
    """Record these labels of parameters and return the step, if there is a rule for them."""
    slots = labelling.problem.input_nodes(node)
    labels = {name: label or WHOLE for name, label in given.items()}
    if (asked := resolve_slot_labels(labelling, slots, values, given)) is None:
        return None
    wants, once = asked
    rule = labelling.rule_for(node, wants, once)
    if rule is None and (cut := _cut_buffers(labelling, slots, wants, labels)):
        wants, rule = cut, labelling.rule_for(node, cut, once)
    if rule is None or rule.out == WHOLE or (once and rule.out != PARTIAL):
        return None
    if rule.out == PARTIAL and not any(isinstance(x, Split | Tiled) for x in values):
        return None  # a product over cut weights alone: more to sum than to save
    labelling.parameters.update(labels)
    role = "row" if rule.out == PARTIAL else "column"
    labelling.roles.update({name: role for name, label in labels.items() if label != WHOLE})
    labelling.roles.update({name: "once" for name, label in given.items() if label is None})
    return OperationStep(tuple(wants), rule, once)


def _cut_buffers(
    labelling: WeightLabelling,
    slots: list[fx.Node],
    wants: list[Label],
    labels: Mapping[str, Label],
) -> list[Label] | None:
    """Cut buffers like the vectors of the same operation (running statistics per channel)."""
    buffers = labelling.problem.buffers
    cut = next((label for label in labels.values() if isinstance(label, Split)), None)
    if cut is None or not any(one in buffers for one in slots):
        return None
    return [cut if one in buffers else want for one, want in zip(slots, wants, strict=True)]
