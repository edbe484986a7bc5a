"""Label every value of a traced layer, for one choice of which weights are split.

The labelling walks the graph in order. If there is a rule for an operation's inputs as they are, it
uses that rule. A weight that meets a whole activation is split by column; its result is split. A
weight that meets a split activation is split by row; its result is a sum over ranks. That sum is
completed at once or, where only sums follow, later. Otherwise whole inputs are cut (which costs
nothing); as a last resort split inputs are gathered: a *conflict*.

Source: GSPMD's propagation (2105.04663); column and row: Megatron-LM (1909.08053).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from shoal.base.errors import BugError
from shoal.parallel.spmd.labelling.candidates import enumerate_cuts
from shoal.parallel.spmd.labelling.labels import (
    PARTIAL,
    WHOLE,
    Label,
    Partial,
    Split,
    Tiled,
    divides,
)
from shoal.parallel.spmd.labelling.operation_terms import (
    GatherConflict,
    IndivisibleSequence,
    OperationStep,
    WeightChoice,
    may_stay_split,
)
from shoal.parallel.spmd.labelling.problem import LabellingProblem, is_getitem
from shoal.parallel.spmd.labelling.rules import LabelRule
from shoal.trace.graph.layer_graph import is_in_place, is_opaque

SMALL = 8
"""A sum over ranks that no weight needs may have up to 1 / SMALL of its input's elements."""


class Labelling:
    """Labels of a graph's values, split, replicated or partial, in one attempt.

    Attributes:
        choices: choice per weight matrix; without one, a matrix is split where possible.
        fixed: parameters whose label is fixed.
        lazy: positions of outputs that may stay split: the reader gathers them.
        labels: per node: its label, or a tuple of labels.
        steps: step per operation.
        parameters: labels of parameters, by name; roles: column or row, for split parameters.
        conflicts: values that must be gathered.
        summed: elements of sums over ranks that no weight needs.
        outputs: the layer's results, and the label under which the layer returns each.
    """

    def __init__(
        self,
        problem: LabellingProblem,
        choices: Mapping[str, WeightChoice],
        fixed: Mapping[str, Label] | None = None,
        lazy: frozenset[int] = frozenset(),
    ) -> None:
        self.problem, self.choices, self.lazy = problem, choices, lazy
        self.labels: dict[fx.Node, Any] = {}
        self.steps: dict[fx.Node, OperationStep] = {}
        self.parameters: dict[str, Label] = dict(fixed or {})
        self.roles: dict[str, str] = {}
        self.conflicts: list[GatherConflict] = []
        self.summed = 0
        self.outputs: list[tuple[fx.Node, Label]] = []
        self._origins: dict[fx.Node, tuple[str, ...]] = {}
        self._of_sequence: dict[tuple[int, ...], Label] = {}  # by shape: how the sequence is cut
        self._along_sequence: set[fx.Node] = set()
        self._label_graph()

    def _label_graph(self) -> None:
        graph = self.problem.traced.graph
        for node in graph.nodes:
            if node.op == "call_function":
                self._label_operation(node)
            elif node.op == "output":
                self._label_output(node)
            elif node not in self.problem.parameters:
                self.labels[node] = self._label_input(node)
        for node in graph.nodes:  # weights, now that all parameters are decided
            if self.problem.sources[node] and node.op == "call_function":
                self.weight(node, {})

    def _label_input(self, node: fx.Node) -> Label:
        dim = self.problem.sequence_dim
        floating = node.op == "placeholder" and node.meta["val"].is_floating_point()
        if dim is None or node not in self.problem.inputs or self._of_sequence or not floating:
            return WHOLE
        shape = tuple(node.meta["val"].shape)
        if len(shape) <= dim or not divides(shape[dim], 1, self.problem.degree):
            raise IndivisibleSequence(shape, dim, self.problem.degree)
        self._of_sequence[shape] = Split(dim)
        self._along_sequence.add(node)
        return Split(dim)

    def _label_output(self, node: fx.Node) -> None:
        values: Any = node.args[0]
        for place, value in enumerate(values):
            along = self._of_sequence.get(tuple(value.meta["val"].shape), WHOLE)
            # Samples × places in one dim: a rank's part is a run of each sample, which no reader
            # outside puts together; it would gather it there.
            wanted = along if may_stay_split(along) else WHOLE
            label = self.label(value)
            split = isinstance(label, Split | Tiled) and label not in (wanted, along)
            if split and not self.is_gathered_anyway(value):
                if place in self.lazy and may_stay_split(label):
                    wanted = label
                else:
                    who = self._splitting_weights(value)
                    self.conflicts.append(GatherConflict(node, value, who, place))
            self.outputs.append((value, wanted))

    def transfer_to(self, problem: LabellingProblem, twins: Mapping[fx.Node, fx.Node]) -> Labelling:
        """Copy the labels to an equal graph; `twins` maps this graph's nodes to that one's."""
        other = copy.copy(self)
        other.problem = problem
        other.labels = {twins[node]: label for node, label in self.labels.items()}
        other.steps = {twins[node]: step for node, step in self.steps.items()}
        other.outputs = [(twins[node], label) for node, label in self.outputs]
        other.conflicts = [
            replace(one, node=twins[one.node], value=twins[one.value]) for one in self.conflicts
        ]
        return other

    def label(self, node: fx.Node) -> Any:
        """Return the label of a value; the label of a weight follows from its parameters."""
        if self.problem.sources[node]:
            return self.weight(node, {})
        return self.labels[node]

    # ---- weights

    def weight(self, node: fx.Node, given: Mapping[str, Label]) -> Any:
        """Return the label of a weight, from the labels of its parameters; None: no rule.

        Args:
            given: labels of some parameters; the others have the label decided before.
        """
        if node in self.problem.parameters:
            name = self.problem.parameters[node]
            return given.get(name, self.parameters.get(name, WHOLE))
        if not self.problem.sources[node]:
            return WHOLE
        if is_getitem(node):
            source: Any = node.args[0]
            several = self.weight(source, given)
            place: Any = node.args[1]
            return several[place] if isinstance(several, tuple) else several
        wants = tuple(self.weight(one, given) for one in self.problem.input_nodes(node))
        if any(label is None for label in wants):
            return None
        rule = self.rule_for(node, wants)
        if rule is None and PARTIAL in wants:  # squares of a cut weight, summed: few numbers
            wants = tuple(WHOLE if want == PARTIAL else want for want in wants)
            rule = self.rule_for(node, wants)
        if rule is not None and not given:
            self.steps[node] = OperationStep(wants, rule)
            self.labels[node] = rule.out
        return None if rule is None else rule.out

    def _undecided(self, node: fx.Node) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of parameters of an operation that have no label yet."""
        slots = self.problem.input_nodes(node)
        names = itertools.chain(*(sorted(self.problem.sources[one]) for one in slots))
        return {
            name: tuple(self.problem.by_name[name].meta["val"].shape)
            for name in dict.fromkeys(names)
            if name not in self.parameters
        }

    # ---- operations

    def rule_for(
        self, node: fx.Node, wants: Sequence[Label], once: frozenset[int] = frozenset()
    ) -> LabelRule | None:
        """Return the rule for an operation whose inputs have the labels `wants`; None: none."""
        if all(label == WHOLE for label in wants) and not once:
            value: Any = node.meta.get("val")
            many = isinstance(value, list | tuple)
            return LabelRule(tuple(WHOLE for _ in value) if many else WHOLE)
        rules, call = self.problem.rules, self.problem.call(node)
        rule = rules.find(call, tuple(wants), self.problem.degree, once)
        if rule is not None and rule.joint and not self.problem.shares:
            return None
        if rule is not None and rule.averaged and not self.problem.averages:
            return None
        if rule is not None and is_in_place(node) and not self._may_write(node, wants, rule):
            return None
        return rule

    def _may_write(self, node: fx.Node, wants: Sequence[Label], rule: LabelRule) -> bool:
        """Return whether an in-place operation keeps its target's label or may be replaced."""
        target: Any = node.args[0]
        return node in self.problem.replaceable or wants[0] == rule.out == self.label(target)

    def _label_operation(self, node: fx.Node) -> None:
        if self.problem.sources[node]:
            return  # labelled when it is used
        if is_getitem(node):
            source: Any = node.args[0]
            self.labels[node] = self.label(source)[node.args[1]]
            self._record_origins(node, [source])
            return
        slots = self.problem.input_nodes(node)
        if not all(isinstance(one.meta.get("val"), Tensor) for one in slots):
            self._record_step(node, OperationStep(tuple(WHOLE for _ in slots), LabelRule(WHOLE)))
            return
        undecided = self._undecided(node)
        if not undecided and all(self.label(one) == WHOLE for one in slots):
            self._record_step(node, self._make_whole_step(node))
        elif not self._keep_partial(node, slots):
            self._record_step(node, self._choose_step(node, slots, undecided))

    def _make_whole_step(self, node: fx.Node) -> OperationStep:
        wants = tuple(WHOLE for _ in self.problem.input_nodes(node))
        rule = self.rule_for(node, wants)
        if rule is None:
            raise BugError(f"no rule for whole inputs of {node.target}")
        return OperationStep(wants, rule)

    def _keep_partial(self, node: fx.Node, slots: list[fx.Node]) -> bool:
        """Keep the result of summands only (Partial) a summand too; return True if that is done."""
        if not all(isinstance(self.label(one), Partial) for one in slots):
            return False
        if any(len(one.users) > 1 for one in slots) or is_in_place(node):
            return False
        rule = self.rule_for(node, [PARTIAL] * len(slots))
        if rule is None or rule.out != PARTIAL:
            return False
        self._record_step(node, OperationStep((PARTIAL,) * len(slots), rule))
        return True

    def _choose_step(
        self, node: fx.Node, slots: list[fx.Node], undecided: Mapping[str, tuple[int, ...]]
    ) -> OperationStep:
        """Choose labels of undecided weights; without any, or if that fails, fit the inputs."""
        values = [None if self.problem.sources[one] else self._reduced_label(one) for one in slots]
        if undecided:
            if is_opaque(node.target):
                from shoal.parallel.spmd.labelling.opaque_weights import (
                    choose_parameter_labels,  # few models have such parts
                )
            else:
                from shoal.parallel.spmd.labelling.weight_cuts import (
                    choose_parameter_labels,  # under cp all weights are whole: none is undecided
                )

            step = choose_parameter_labels(self, node, values, undecided)
            if step is not None:
                return step
        self.parameters.update(dict.fromkeys(undecided, WHOLE))
        values = [self._gathered_label(n, v) for n, v in zip(slots, values, strict=True)]
        return self._fit_inputs(node, slots, values)

    def _reduced_label(self, node: fx.Node) -> Any:
        """Return a value's label after partial sums are reduced: sequence-sharded or replicated."""
        label = self.label(node)
        if not isinstance(label, Partial):
            return label
        return self._of_sequence.get(tuple(node.meta["val"].shape), WHOLE)

    def _gathered_label(self, node: fx.Node, label: Any) -> Any:
        """Return WHOLE for a sequence part that a split weight gathers anyway."""
        if label is None or label == WHOLE or not self.is_gathered_anyway(node):
            return label
        for user in node.users:
            for name in set().union(
                *(self.problem.sources[n] for n in self.problem.input_nodes(user))
            ):
                given = self.parameters.get(name)
                left = given is None and self.choices.get(name, WeightChoice()).kind != "whole"
                is_matrix = self.problem.by_name[name].meta["val"].dim() > 1
                if is_matrix and (left or isinstance(given, Split)):
                    return WHOLE
        return label

    # ---- everything else

    def _fit_inputs(self, node: fx.Node, slots: list[fx.Node], values: list[Any]) -> OperationStep:
        """Find a rule for the inputs; else split replicated inputs; else gather split ones."""
        labels: list[Label] = [
            self.weight(one, {}) if label is None else label
            for one, label in zip(slots, values, strict=True)
        ]
        weights = [bool(self.problem.sources[one]) for one in slots]
        if None in labels:  # a weight of parameters that do not fit each other
            return self._make_whole_step(node)
        shapes = [_shape(one) for one in slots]
        split = [k for k, label in enumerate(labels) if isinstance(label, Split | Tiled)]
        split.sort(key=lambda k: (not self.is_gathered_anyway(slots[k]), -k))  # keys before queries
        for count in range(len(split)):
            for gathered in itertools.combinations(split, count):
                wants = [WHOLE if k in gathered else label for k, label in enumerate(labels)]
                for tried, once in enumerate_cuts(shapes, wants, weights, self.problem.degree):
                    rule = self.rule_for(node, tried, once)
                    if rule is not None and (rule.out == PARTIAL or not once):
                        return OperationStep(tuple(tried), rule, once)
        return self._make_whole_step(node)

    # ---- what follows from a step

    def _record_step(self, node: fx.Node, step: OperationStep) -> None:
        self.steps[node] = step
        self.labels[node] = step.rule.out
        slots = self.problem.input_nodes(node)
        used = [one for one, want in zip(slots, step.wants, strict=True) if want != WHOLE]
        self._record_origins(node, used)
        split = [one for one in slots if isinstance(self.label(one), Split | Tiled)]
        unfit = [one for one in slots if self.label(one) is None]
        for one, want in zip(slots, step.wants, strict=True):
            if one in unfit or (
                one in split and want != self.label(one) and not self.is_gathered_anyway(one)
            ):
                names = [
                    name
                    for other in (one, *split, *unfit)
                    for name in self._splitting_weights(other)
                ]
                self.conflicts.append(GatherConflict(node, one, tuple(dict.fromkeys(names))))
        if step.rule.out == PARTIAL and not any(self.problem.sources[one] for one in slots):
            self._record_costly_sum(node, used)

    def _record_costly_sum(self, node: fx.Node, used: list[fx.Node]) -> None:
        """Count a sum over ranks that no weight requires, and record a conflict if it is large.

        Large is more than 1 / SMALL of its largest split input; the mean of a norm is smaller.

        Args:
            node: the operation whose result is a summand on each rank.
            used: its inputs that are not whole.
        """
        size = self.problem.size(node)
        split = [one for one in used if isinstance(self.label(one), Split | Tiled)]
        self.summed += size if split else 0
        if split and size * SMALL > max(self.problem.size(one) for one in split):
            self.conflicts.append(
                GatherConflict(node, split[0], self._splitting_weights(split[0]), dear=True)
            )

    def _record_origins(self, node: fx.Node, used: list[fx.Node]) -> None:
        """Record which weights split a value, and whether it is cut along the sequence only."""
        label = self.labels[node]
        if not isinstance(label, Split | Tiled | tuple):
            return
        names = [name for one in used for name in self._splitting_weights(one)]
        self._origins[node] = tuple(dict.fromkeys(names))
        values = [one for one in used if not self.problem.sources[one]]
        values = [one for one in values if self.label(one) != WHOLE]
        if values and all(self.is_gathered_anyway(one) or self._scattered(one) for one in values):
            self._along_sequence.add(node)
            if isinstance(label, Split):
                self._of_sequence.setdefault(_shape(node), label)

    def _splitting_weights(self, node: fx.Node) -> tuple[str, ...]:
        own = [n for n in sorted(self.problem.sources[node]) if self.parameters.get(n) != WHOLE]
        return tuple(own) or self._origins.get(node, ())

    def is_gathered_anyway(self, node: fx.Node) -> bool:
        """Return whether the plan gathers this value anyway: it is cut along the sequence."""
        return node in self._along_sequence

    def _scattered(self, node: fx.Node) -> bool:
        """Return whether a sum over ranks becomes its part along the sequence."""
        return isinstance(self.label(node), Partial) and _shape(node) in self._of_sequence


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
