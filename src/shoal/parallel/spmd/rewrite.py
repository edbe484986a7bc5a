"""Writes the program of one rank: the traced operations on parts, with exchanges between them.

Every operation gets its inputs under the labels that its rule wants, sizes among its arguments
divided where the rule says so, dropout with the part of the whole mask. A value is gathered,
summed, cut or entered once, however many operations read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx

from shoal.parallel._torch import pytree
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.gradients import Held, Sums, differentiable, held_as, need_gradients
from shoal.parallel.spmd.label import Labelling
from shoal.parallel.spmd.labels import WHOLE, Label
from shoal.parallel.spmd.node_arguments import divided
from shoal.parallel.spmd.rules import DROPOUTS
from shoal.parallel.spmd.steps import Step
from shoal.trace.graph import Untraceable, is_in_place

aten = torch.ops.aten

Shared = Callable[..., torch.Tensor]
"""Attention of this rank's queries to the keys of all ranks."""


@dataclass(frozen=True)
class Exchange:
    """One collective of a split layer's forward or backward pass.

    kind            all_reduce │ all_gather │ reduce_scatter
    when            forward │ backward
    payload_bytes   the whole tensor, as `fabric.traffic` counts payloads
    after           the operation and the parameter whose result (or gradient) it completes
    """

    kind: str
    when: str
    payload_bytes: int
    after: str


def rewrite(
    labelling: Labelling, sums: Sums, attention: Shared | None = None
) -> tuple[fx.GraphModule, tuple[Exchange, ...]]:
    """`run(axis, *local parameters, *local buffers, *inputs)` and its collectives, in order.

    attention   what computes attention that is shared: (q, axis, k, v, causal=, scale=)
    """
    writer = _Writer(labelling, sums, attention)
    for node in labelling.problem.traced.graph.nodes:
        writer.write(node)
    writer.graph.lint()
    module = fx.GraphModule(labelling.problem.traced.module, writer.graph)
    return module, tuple(writer.exchanges)


def between_exchanges(run: fx.GraphModule) -> fx.GraphModule:
    """The same program for a compiler, which makes code of what stands between the exchanges.

    They, shared attention and a user's autograd functions are Python, and run as they are.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(run.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, FunctionType):
            node.target = _uncompiled(node.target)
    return fx.GraphModule(run, graph)


def _uncompiled(function: FunctionType) -> Callable[..., Any]:
    """The function, which the compiler leaves alone, under a name that generated code can hold."""
    left: Any = torch.compiler.disable(function)
    left.__name__ = left.__qualname__ = function.__name__
    left.__module__ = function.__module__
    named: Callable[..., Any] = left
    return named


class _Writer:
    def __init__(self, labelling: Labelling, sums: Sums, attention: Shared | None) -> None:
        self.labelling, self.sums, self.problem = labelling, sums, labelling.problem
        self.attention = attention
        self.graph = fx.Graph()
        self.axis = self.graph.placeholder("axis")
        self.local: dict[fx.Node, fx.Node] = {}
        self.made: dict[Any, fx.Node] = {}
        self.exchanges: list[Exchange] = []
        self.certain = need_gradients(self.problem.traced)

    def write(self, node: fx.Node) -> None:
        """Write one operation."""
        if node.op == "output":
            outputs = [self._handed(n, want, True) for n, want in self.labelling.outputs]
            self.graph.output(tuple(outputs))
        elif node.op != "call_function" or node not in self.labelling.steps:
            self.local[node] = self.graph.node_copy(node, lambda n: self.local[n])
        else:
            self.local[node] = self._operation(node, self.labelling.steps[node])

    def _operation(self, node: fx.Node, step: Step) -> fx.Node:
        slots = self.problem.slots(node)
        plain = all(want == WHOLE for want in step.wants) and not step.once
        stays_whole = plain and (node, "own") not in self.sums.parts
        handed = []
        for place, (one, want) in enumerate(zip(slots, step.wants, strict=True)):
            value = self._handed(one, want, stays_whole)
            if place in step.once:
                value = self._call(autograd_collectives.once, value)
            handed.append(value)
        if step.rule.joint and self.attention is not None:
            options: dict[str, Any] = dict(node.kwargs)
            return self._call(self.attention, *handed, **options)
        if step.rule.masked or _is_strided_dropout(node, slots):
            return self._dropout(node, handed[0], step.wants[0])
        if is_in_place(node) and handed[0] is not self.local.get(slots[0]):
            if node not in self.problem.replaceable:
                raise Untraceable(f"{node.target} changes in place what others read, too")
            handed[0] = self.graph.call_function(aten.clone.default, (handed[0],))
        values = iter(handed)
        edited = divided([list(node.args), dict(node.kwargs)], step.rule.edits)
        args, kwargs = pytree.tree_map_only(fx.Node, lambda _: next(values), edited)
        target: Any = node.target
        if target is aten.view.default and not plain:
            target = aten.reshape.default
        made = self.graph.call_function(target, tuple(args), kwargs)
        for place in step.rule.writes:
            self._complete(slots[place], handed[place], step.wants[place])
        return made

    def _complete(self, buffer: fx.Node, own: fx.Node, label: Label) -> None:
        """A buffer of which this rank changed its part."""
        if label == WHOLE:
            return
        self._note("all_gather", "forward", buffer)
        self._call(autograd_collectives.complete, own, self.local[buffer], split=label)

    def _dropout(self, node: fx.Node, value: fx.Node, label: Label) -> fx.Node:
        return self._call(
            autograd_collectives.dropout,
            value,
            label=label,
            probability=node.args[1],
            order=_order_in_memory(self.problem.slots(node)[0]),
        )

    # ---- values under the labels that are wanted

    def _handed(self, node: fx.Node, want: Label, whole_gradient: bool) -> fx.Node:
        label = self.labelling.label(node)
        if isinstance(label, tuple):
            return self.local[node]
        form = held_as(label, want)
        if form is None:
            if want == label:
                return self.local[node]
            return self._once_for((node, "sum", want), lambda: self._scattered(node, want))
        held = (node, form)
        value = self._whole(held, label)
        if want == WHOLE:
            return value if whole_gradient else self._entered(held, value)
        return self._once_for((node, form, want), lambda: self._cut(held, value, want))

    def _whole(self, held: Held, label: Label) -> fx.Node:
        node, form = held
        if form == "own":
            return self.local[node]
        if form == "reduced":
            return self._once_for(held, lambda: self._reduced(node))
        return self._once_for(held, lambda: self._gathered(held, label))

    def _reduced(self, node: fx.Node) -> fx.Node:
        self._note("all_reduce", "forward", node)
        return self._call(autograd_collectives.reduce, self.local[node])

    def _scattered(self, node: fx.Node, want: Label) -> fx.Node:
        self._note("reduce_scatter", "forward", node)
        self._note("all_gather", "backward", node)
        return self._call(autograd_collectives.scatter, self.local[node], split=want)

    def _gathered(self, held: Held, label: Label) -> fx.Node:
        node = held[0]
        parts = held in self.sums.parts
        self._note("all_gather", "forward", node)
        if parts:
            self._note("reduce_scatter", "backward", node)
        return self._call(
            autograd_collectives.gather, self.local[node], split=label, part_gradients=parts
        )

    def _entered(self, held: Held, value: fx.Node) -> fx.Node:
        if held not in self.sums.entered or not differentiable(held[0]):
            return value

        def make() -> fx.Node:
            self._note("all_reduce", "backward", held[0])
            return self._call(autograd_collectives.enter, value)

        return self._once_for((*held, "entered"), make)

    def _cut(self, held: Held, value: fx.Node, want: Label) -> fx.Node:
        parts = self.sums.gives_parts(held) or not differentiable(held[0])
        value = self._entered(held, value)
        if not parts:
            self._note("all_gather", "backward", held[0])
        return self._call(autograd_collectives.part, value, label=want, part_gradients=parts)

    def _once_for(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _call(
        self, function: Callable[..., Any], value: fx.Node, *more: fx.Node, **options: Any
    ) -> fx.Node:
        return self.graph.call_function(_with(function, options), (value, self.axis, *more))

    def _note(self, kind: str, when: str, node: fx.Node) -> None:
        if when == "backward" and node not in self.certain:
            return
        value = node.meta["val"]
        size_bytes = value.numel() * value.element_size()
        self.exchanges.append(Exchange(kind, when, size_bytes, self._told(node)))

    def _told(self, node: fx.Node) -> str:
        names = sorted({n for one in node.all_input_nodes for n in self.problem.sources[one]})
        target = node.target  # a plain function would tell its address in memory
        named = target.__name__ if isinstance(target, FunctionType) else str(target)
        operation = named.removeprefix("aten.").split(".")[0]
        if node.op == "placeholder":
            operation = self.problem.parameters.get(node, "input")
        return f"{operation} ({', '.join(names)})" if names else operation


def _is_strided_dropout(node: fx.Node, slots: list[fx.Node]) -> bool:
    """Dropout whose mask one process draws in another order than that of the dims.

    Here the value may lie in memory otherwise: what was summed or gathered is contiguous.
    """
    if node.target not in DROPOUTS or not (node.args[1] and node.args[2]):
        return False
    return not slots[0].meta["val"].is_contiguous()


def _order_in_memory(node: fx.Node) -> tuple[int, ...]:
    strides = node.meta["val"].stride()
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _with(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The function with its options, under a name that generated code can hold."""

    def call(*tensors: Any) -> Any:
        return function(*tensors, **options)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = "exchange"
    return call
