"""Write the program of one rank: the traced operations on parts, with collectives between them.

Every operation receives its inputs under the labels that its rule wants. Integer arguments that are
sizes are divided if the rule says so, and dropout uses the rank's part of the whole mask. A value
is gathered, summed, cut or entered once, however many operations read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Partial, Split, Tiled
from shoal.parallel.spmd.labelling.node_arguments import divide_arguments
from shoal.parallel.spmd.labelling.operation_terms import OperationStep
from shoal.parallel.spmd.labelling.rules import DROPOUTS
from shoal.parallel.spmd.labelling.summed_gradients import (
    GradientSumPlaces,
    Held,
    is_differentiable,
    list_differentiated_nodes,
    whole_form,
)
from shoal.trace.graph.layer_graph import UntraceableLayer, is_in_place

aten = torch.ops.aten

Shared = Callable[..., torch.Tensor]
"""Attention of this rank's queries to the keys of all ranks."""


@dataclass(frozen=True)
class BlockCollective:
    """Collective of a split layer's forward or backward pass.

    Attributes:
        kind: all_reduce │ all_gather │ reduce_scatter.
        when: forward │ backward.
        payload_bytes: the whole tensor, as `fabric.traffic` counts payloads.
        after: the operation and the parameter whose result (or gradient) it completes.
    """

    kind: str
    when: str
    payload_bytes: int
    after: str


@dataclass(frozen=True)
class AxisDivision:
    """Division of a layer over one axis: labels of its values, and where gradients are summed."""

    labelling: Labelling
    sums: GradientSumPlaces


def write_program(
    divisions: Sequence[AxisDivision], attention: Shared | None = None
) -> tuple[fx.GraphModule, tuple[tuple[BlockCollective, ...], ...]]:
    """Write the program of one rank and list the collectives of every axis.

    The program is `run(*axes, *local parameters, *local buffers, *inputs)`.

    Args:
        divisions: divisions of one traced layer, the outermost first: each divides the parts that
            the ones before it leave.
        attention: function for shared attention: (q, axis, k, v, causal=, scale=).

    Raises:
        Untraceable: two axes divide one dim and the outer one would change the inner one's part.
    """
    writer = _ProgramWriter(divisions, attention)
    for node in writer.problem.traced.graph.nodes:
        writer.write(node)
    writer.graph.lint()
    module = fx.GraphModule(writer.problem.traced.module, writer.graph)
    return module, tuple(tuple(one.exchanges) for one in writer.sides)


class _AxisProgram:
    """Program state of one axis: its labels, its ranks, its collectives so far."""

    def __init__(self, division: AxisDivision, axis: fx.Node) -> None:
        self.labelling, self.sums = division.labelling, division.sums
        self.problem, self.axis = division.labelling.problem, axis
        self.certain = list_differentiated_nodes(self.problem.traced)
        self.exchanges: list[BlockCollective] = []

    def stays_whole(self, node: fx.Node) -> bool:
        """Return whether all ranks compute an operation redundantly, with full gradients."""
        return self.is_plain(node) and (node, "own") not in self.sums.parts

    def is_plain(self, node: fx.Node) -> bool:
        """Return whether all ranks compute an operation redundantly."""
        step = self.labelling.steps.get(node)
        return step is None or (all(want == WHOLE for want in step.wants) and not step.once)

    def record_collective(self, kind: str, when: str, node: fx.Node) -> None:
        """Count a collective."""
        if when == "backward" and node not in self.certain:
            return
        value = node.meta["val"]
        size_bytes = value.numel() * value.element_size()
        self.exchanges.append(BlockCollective(kind, when, size_bytes, self._describe_node(node)))

    def _describe_node(self, node: fx.Node) -> str:
        names = sorted({n for one in node.all_input_nodes for n in self.problem.sources[one]})
        target = node.target  # str() of a plain function shows its address in memory
        named = target.__name__ if isinstance(target, FunctionType) else str(target)
        operation = named.removeprefix("aten.").split(".")[0]
        if node.op == "placeholder":
            operation = self.problem.parameters.get(node, "input")
        return f"{operation} ({', '.join(names)})" if names else operation


class _ProgramWriter:
    """Writer of one rank's program; values are identified by nodes of the traced graph."""

    def __init__(self, divisions: Sequence[AxisDivision], attention: Shared | None) -> None:
        self.graph, self.attention = fx.Graph(), attention
        self.sides = [
            _AxisProgram(one, self.graph.placeholder(f"axis_{k}"))
            for k, one in enumerate(divisions)
        ]
        self.problem = self.sides[0].problem
        self.local: dict[fx.Node, fx.Node] = {}
        self.made: dict[Any, fx.Node] = {}

    def write(self, node: fx.Node) -> None:
        """Write one operation."""
        if node.op == "output":
            wanted = [[want for _, want in side.labelling.outputs] for side in self.sides]
            values: Any = node.args[0]
            whole = [True] * len(self.sides)
            outputs = [
                self._convert_value(value, wants, whole)
                for value, wants in zip(values, zip(*wanted, strict=True), strict=True)
            ]
            self.graph.output(tuple(outputs))
        elif node.op != "call_function" or not any(node in s.labelling.steps for s in self.sides):
            self.local[node] = self.graph.node_copy(node, lambda n: self.local[n])
        else:
            self.local[node] = self._write_operation(node)

    def _write_operation(self, node: fx.Node) -> fx.Node:
        slots, handed = self.problem.input_nodes(node), self._convert_inputs(node)
        steps = [(side, side.labelling.steps.get(node)) for side in self.sides]
        known = [(side, step) for side, step in steps if step is not None]
        for side, step in known:
            if step.rule.joint and self.attention is not None:
                options: dict[str, Any] = dict(node.kwargs)
                return self._write_call(self.attention, handed[0], side, *handed[1:], **options)
        if any(step.rule.masked for _, step in known) or _is_strided_dropout(node, slots):
            return self._write_dropout(node, handed[0], known)
        if is_in_place(node) and handed[0] is not self.local.get(slots[0]):
            if node not in self.problem.replaceable:
                raise UntraceableLayer(f"{node.target} changes in place what others read, too")
            handed[0] = self.graph.call_function(aten.clone.default, (handed[0],))
        values = iter(handed)
        edited: Any = [list(node.args), dict(node.kwargs)]
        for _, step in known:
            edited = divide_arguments(edited, step.rule.edits)
        args, kwargs = pytree.tree_map_only(fx.Node, lambda _: next(values), edited)
        target: Any = node.target
        if target is aten.view.default and not all(side.is_plain(node) for side in self.sides):
            target = aten.reshape.default
        made = self.graph.call_function(target, tuple(args), kwargs)
        for side, step in known:
            if step.rule.averaged:
                degree = side.problem.degree
                made = self.graph.call_function(aten.div.Scalar, (made, degree))
        for side, step in known:
            for place in step.rule.writes:
                self._gather_buffer(slots[place], handed[place], side, step.wants[place])
        return made

    def _convert_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return an operation's tensors as each axis wants them."""
        steps = [(side, side.labelling.steps.get(node)) for side in self.sides]
        stay_whole = [side.stays_whole(node) for side in self.sides]
        handed = []
        for place, one in enumerate(self.problem.input_nodes(node)):
            wants = [
                side.labelling.label(one) if step is None else step.wants[place]
                for side, step in steps
            ]
            value = self._convert_value(one, wants, stay_whole)
            for side, step in steps:
                if step is not None and place in step.once:
                    value = self._write_call(autograd_collectives.keep_on_first_rank, value, side)
            handed.append(value)
        return handed

    def _gather_buffer(
        self, buffer: fx.Node, own: fx.Node, side: _AxisProgram, label: Label
    ) -> None:
        """Gather a buffer of which this rank changed its part."""
        if label == WHOLE:
            return
        if len(self.sides) > 1:
            raise UntraceableLayer("it writes into a buffer of which every rank has a part")
        side.record_collective("all_gather", "forward", buffer)
        self._write_call(
            autograd_collectives.gather_buffer, own, side, self.local[buffer], split=label
        )

    def _write_dropout(
        self, node: fx.Node, value: fx.Node, known: Sequence[tuple[_AxisProgram, OperationStep]]
    ) -> fx.Node:
        options = {
            "labels": tuple(step.wants[0] for _, step in known),
            "probability": node.args[1],
            "order": _order_in_memory(self.problem.input_nodes(node)[0]),
        }
        axes = [side.axis for side, _ in known]
        return self.graph.call_function(
            _bind_options(autograd_collectives.dropout, options), (value, *axes)
        )

    # ---- values under the labels that are wanted

    def _convert_value(
        self, node: fx.Node, wants: Sequence[Label], whole: Sequence[bool]
    ) -> fx.Node:
        """Return a value as each axis wants it; `whole`: its gradient is full over that axis.

        Gathers and sums start at the innermost axis, cuts at the outermost. In between, every axis
        divides the part that the axes before it leave.
        """
        value = self.local[node]
        sides = list(zip(self.sides, wants, whole, strict=True))
        for place, (side, want, _) in reversed([*enumerate(sides)]):
            if self._whole_form(node, side, want) in ("gathered", "reduced"):
                self._check_nested(node, place, wants)
                value = self._make_whole(node, value, side)
        for place, (side, want, whole_gradient) in enumerate(sides):
            form = self._whole_form(node, side, want)
            if form == "as it is":
                continue
            if want != WHOLE:
                self._check_nested(node, place, wants)
            value = self._convert_form(node, value, side, form, want, whole_gradient)
        return value

    def _check_nested(self, node: fx.Node, place: int, wants: Sequence[Label]) -> None:
        """Raise Untraceable if an inner axis keeps its part of a dim that this axis changes.

        Raises:
            Untraceable: ranks of two axes divide the value along one dim.
        """
        changed = _split_dims(self.sides[place].labelling.label(node)) | _split_dims(wants[place])
        for inner, want in zip(self.sides[place + 1 :], wants[place + 1 :], strict=True):
            if inner.labelling.label(node) == want and _split_dims(want) & changed:
                raise UntraceableLayer(f"{node.name} is divided along one dim by ranks of two axes")

    def _whole_form(self, node: fx.Node, side: _AxisProgram, want: Label) -> str:
        """Return the form in which a value is read: one of `whole_form`, scattered, or as it is."""
        label = side.labelling.label(node)
        if isinstance(label, tuple):
            return "as it is"
        form = whole_form(label, want)
        if form is None:
            return "as it is" if want == label else "scattered"
        return form

    def _convert_form(
        self,
        node: fx.Node,
        value: fx.Node,
        side: _AxisProgram,
        form: str,
        want: Label,
        whole_gradient: bool,
    ) -> fx.Node:
        if form == "scattered":
            return self._write_reduce_scatter(node, value, side, want)
        held = (node, form)
        if want == WHOLE:
            return value if whole_gradient else self._write_enter(held, value, side)
        return self._write_cut(held, value, side, want)

    def _make_whole(self, node: fx.Node, value: fx.Node, side: _AxisProgram) -> fx.Node:
        label = side.labelling.label(node)
        if isinstance(label, Partial):
            return self._memoize(
                (value, side, "reduced"), lambda: self._write_all_reduce(node, value, side)
            )
        return self._memoize(
            (value, side, "gathered"), lambda: self._write_all_gather(node, value, side, label)
        )

    def _write_all_reduce(self, node: fx.Node, value: fx.Node, side: _AxisProgram) -> fx.Node:
        side.record_collective("all_reduce", "forward", node)
        return self._write_call(autograd_collectives.reduce, value, side)

    def _write_reduce_scatter(
        self, node: fx.Node, value: fx.Node, side: _AxisProgram, want: Label
    ) -> fx.Node:
        def make() -> fx.Node:
            side.record_collective("reduce_scatter", "forward", node)
            side.record_collective("all_gather", "backward", node)
            return self._write_call(autograd_collectives.scatter, value, side, split=want)

        return self._memoize((value, side, "scattered", want), make)

    def _write_all_gather(
        self, node: fx.Node, value: fx.Node, side: _AxisProgram, label: Label
    ) -> fx.Node:
        parts = (node, "gathered") in side.sums.parts
        side.record_collective("all_gather", "forward", node)
        if parts:
            side.record_collective("reduce_scatter", "backward", node)
        return self._write_call(
            autograd_collectives.gather, value, side, split=label, part_gradients=parts
        )

    def _write_enter(self, held: Held, value: fx.Node, side: _AxisProgram) -> fx.Node:
        if held not in side.sums.entered or not is_differentiable(held[0]):
            return value

        def make() -> fx.Node:
            side.record_collective("all_reduce", "backward", held[0])
            return self._write_call(autograd_collectives.enter, value, side)

        return self._memoize((value, side, "entered"), make)

    def _write_cut(self, held: Held, value: fx.Node, side: _AxisProgram, want: Label) -> fx.Node:
        def make() -> fx.Node:
            parts = side.sums.returns_parts(held) or not is_differentiable(held[0])
            whole = self._write_enter(held, value, side)
            if not parts:
                side.record_collective("all_gather", "backward", held[0])
            return self._write_call(
                autograd_collectives.slice_own_part, whole, side, label=want, part_gradients=parts
            )

        return self._memoize((value, side, "cut", want), make)

    def _memoize(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _write_call(
        self,
        function: Callable[..., Any],
        value: fx.Node,
        side: _AxisProgram,
        *more: fx.Node,
        **options: Any,
    ) -> fx.Node:
        return self.graph.call_function(_bind_options(function, options), (value, side.axis, *more))


def _split_dims(label: Label) -> set[int]:
    """Return the dims that a label divides."""
    if isinstance(label, Tiled):
        return {one.dim for _, one in label.axes if isinstance(one, Split)}
    return {label.dim} if isinstance(label, Split) else set()


def _is_strided_dropout(node: fx.Node, slots: list[fx.Node]) -> bool:
    """Return whether a node is dropout whose mask one process draws in another order of dims.

    On a rank the value may have other strides: sums and gathers return contiguous tensors.
    """
    if node.target not in DROPOUTS or not (node.args[1] and node.args[2]):
        return False
    return not slots[0].meta["val"].is_contiguous()


def _order_in_memory(node: fx.Node) -> tuple[int, ...]:
    strides = node.meta["val"].stride()
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _bind_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Bind options to a function, under a name that generated code can use."""

    def call(*tensors: Any) -> Any:
        return function(*tensors, **options)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = "exchange"
    return call
