"""Choose where gradients are summed: a minimum cut between replicated values and split work.

A value that every rank holds whole has, on every rank, either its whole gradient or a part of it.
Split work gives parts; the layer's inputs and outputs, and summed values, have whole gradients. A
value at which one becomes the other costs an all-reduce in the backward pass
(`autograd_collectives.enter`), once per value. The cheapest set of such values is a minimum cut of
the graph of whole values, and of several minimum cuts the last. So norms before a column product
keep whole gradients, and a key projection that stays whole next to a split query shares its
all-reduce.

    parameter with parts     free: summed once a step, with all others of its kind
    gathered value           reduce-scatter, or with whole gradients nothing at all
    whole value that is cut  all-gather, or with parts nothing at all

Source: max-flow min-cut (Ford and Fulkerson 1956), shortest augmenting paths (Edmonds, Karp 1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, fx

from shoal.base.errors import BugError
from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Partial, Split
from shoal.trace.graph.layer_graph import LayerGraph, UntraceableLayer

LATENCY = 1 << 12
"""Cost of one more collective, in elements. Elements, not bytes: the places must not depend on the
precision in which a layer is traced.
"""

ENDLESS = 1 << 60

Held = tuple[fx.Node, str]
"""A whole value: a node as it is ("own"), gathered, or reduced."""


@dataclass(frozen=True)
class GradientSumPlaces:
    """Replicated values whose gradient is a partial sum on every rank.

    Attributes:
        parts: values (and parameters) that have parts.
        entered: values with whole gradients that go into split work through
            `autograd_collectives.enter`.
    """

    parts: frozenset[Held]
    entered: frozenset[Held]

    def returns_parts(self, held: Held) -> bool:
        """Return whether the readers of this value return its gradient in parts."""
        return held in self.parts or held in self.entered


def whole_form(label: Label, want: Label) -> str | None:
    """Return in which replicated form a value is read; None: split, or a scattered sum."""
    if label == WHOLE:
        return "own"
    if isinstance(label, Partial):
        return "reduced" if want == WHOLE else None
    return None if label == want else "gathered"


def choose_gradient_sums(
    labelling: Labelling, partial: frozenset[str] | None = None
) -> GradientSumPlaces:
    """Return the values at which gradients are all-reduced at the least cost.

    Args:
        partial: the parameters whose gradients may be in parts, if that is decided: whole gradients
            must then be counted once in the sum over the ranks.

    Raises:
        Untraceable: no place satisfies these conditions.
    """
    flow = _FlowNetwork()
    network = _GradientNetwork(labelling, flow)
    if partial is not None:
        network.fix_partial(partial)
    for node in labelling.problem.traced.graph.nodes:
        if node.op == "call_function":
            network.add_operation(node)
    for value, wanted in labelling.outputs:
        network.add_output(value, wanted)
    late = flow.solve_max_flow()
    inside = {held for held in network.seen if (held, "in") in late}
    after = {held for held in network.seen if (held, "out") in late}
    return GradientSumPlaces(frozenset(inside), frozenset(after - inside))


class _GradientNetwork:
    """Flow network of replicated values: full gradients at the source, partial at the sink."""

    def __init__(self, labelling: Labelling, flow: _FlowNetwork) -> None:
        self.labelling, self.flow = labelling, flow
        self.problem = labelling.problem
        self.seen: set[Held] = set()
        self.settled = False
        self.certain = list_differentiated_nodes(self.problem.traced)

    def value(self, held: Held) -> Held:
        """Add a replicated value to the network, unless the network has it."""
        if held in self.seen:
            return held
        self.seen.add(held)
        node, form = held
        size = 0
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            size = value.numel()
            cost = 2 * size + LATENCY if node in self.certain else 1
            self.flow.add_edge((held, "in"), (held, "out"), cost)
        else:
            self.flow.add_edge((held, "in"), (held, "out"), ENDLESS)  # several results: enter each
        if form == "reduced" or (form == "own" and node in self.problem.inputs):
            self.flow.add_edge(SOURCE, (held, "in"), ENDLESS)
        elif form == "gathered":
            self.flow.add_edge(SOURCE, (held, "in"), size + LATENCY)
        elif form == "own" and node in self.problem.parameters and not self.settled:
            self.flow.add_edge(SOURCE, (held, "in"), 1)
        return held

    def fix_partial(self, partial: frozenset[str]) -> None:
        """Give trained parameters full gradients, except those in `partial`."""
        self.settled = True
        for node, name in self.problem.parameters.items():
            whole = self.labelling.parameters.get(name, WHOLE) == WHOLE
            if node in self.problem.traced.trained and whole:
                held = self.value((node, "own"))
                self.flow.add_edge(SOURCE, (held, "in"), 1 if name in partial else ENDLESS)

    def add_operation(self, node: fx.Node) -> None:
        """Add the edges between an operation's inputs and its output."""
        step = self.labelling.steps.get(node)
        if step is None:  # picks one of several results
            source = node.args[0]
            if not isinstance(source, fx.Node):
                raise BugError(f"{node} picks a result of {source}, which is no operation")
            if self.labelling.label(node) == WHOLE and is_differentiable(node):
                self._add_dependency(self.value((node, "own")), self.value((source, "own")))
            return
        plain = all(want == WHOLE for want in step.wants) and not step.once
        slots = self.problem.input_nodes(node)
        for one, want in zip(slots, step.wants, strict=True):
            label = self.labelling.label(one)
            form = whole_form(label, want)
            if form is None or not is_differentiable(one) or isinstance(label, tuple):
                continue
            held = self.value((one, form))
            if want != WHOLE:
                cost = one.meta["val"].numel() + LATENCY
                self.flow.add_edge(
                    (held, "out"), SINK, cost if isinstance(want, Split) else ENDLESS
                )
            elif not plain:
                self.flow.add_edge((held, "out"), SINK, ENDLESS)
            elif is_differentiable(node):
                self._add_dependency(self.value((node, "own")), held)

    def _add_dependency(self, made: Held, source: Held) -> None:
        """Tie a result to a source of it: their gradients are both partial, or both full.

        If the result's gradient is in parts, the source receives parts from it. If it is whole, the
        source's gradient is whole too.
        """
        self.flow.add_edge((source, "out"), (made, "in"), ENDLESS)
        self.flow.add_edge((made, "in"), (source, "in"), ENDLESS)

    def add_output(self, node: fx.Node, wanted: Label) -> None:
        """Require a full gradient of a value that leaves the layer."""
        form = whole_form(self.labelling.label(node), wanted)
        if form is None or not is_differentiable(node):
            return
        held = self.value((node, form))
        if wanted == WHOLE:
            self.flow.add_edge(SOURCE, (held, "in"), ENDLESS)
        else:
            self.flow.add_edge((held, "out"), SINK, node.meta["val"].numel() + LATENCY)


def is_differentiable(node: fx.Node) -> bool:
    """Return whether a value is differentiable: floating, alone or among several tensors."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)


def list_differentiated_nodes(traced: LayerGraph) -> set[fx.Node]:
    """Return values that certainly need a gradient: made of parameters or inputs with one."""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        made = is_differentiable(node) and any(one in found for one in node.all_input_nodes)
        if node in traced.trained or made:
            found.add(node)
    return found


SOURCE, SINK = "source", "sink"


class _FlowNetwork:
    """Flow network with integer capacities."""

    def __init__(self) -> None:
        self.capacity: dict[Hashable, dict[Hashable, int]] = {SOURCE: {}, SINK: {}}

    def add_edge(self, start: Hashable, stop: Hashable, capacity: int) -> None:
        """Add an edge; the capacities of parallel edges add up."""
        edges = self.capacity.setdefault(start, {})
        edges[stop] = min(ENDLESS, edges.get(stop, 0) + capacity)
        self.capacity.setdefault(stop, {}).setdefault(start, 0)

    def solve_max_flow(self) -> set[Hashable]:
        """Maximize the flow and return the nodes that still reach the sink."""
        while True:
            path = self._path()
            if path is None:
                break
            pairs = list(zip(path, path[1:], strict=False))
            room = min(self.capacity[a][b] for a, b in pairs)
            if room >= ENDLESS:
                raise UntraceableLayer("a value must have whole and partial gradients at once")
            for a, b in pairs:
                self.capacity[a][b] -= room
                self.capacity[b][a] += room
        found: set[Hashable] = {SINK}
        waiting: deque[Hashable] = deque([SINK])
        while waiting:
            node = waiting.popleft()
            for other in self.capacity[node]:
                if other not in found and self.capacity[other][node] > 0:
                    found.add(other)
                    waiting.append(other)
        return found

    def _path(self) -> list[Hashable] | None:
        before: dict[Hashable, Hashable] = {SOURCE: SOURCE}
        waiting: deque[Hashable] = deque([SOURCE])
        while waiting:
            node = waiting.popleft()
            for other, room in self.capacity[node].items():
                if room > 0 and other not in before:
                    before[other] = node
                    if other == SINK:
                        path: list[Hashable] = [other]
                        while path[-1] != SOURCE:
                            path.append(before[path[-1]])
                        return path[::-1]
                    waiting.append(other)
        return None
