"""The two halves of a backward pass: first the gradient of the inputs, later those of the weights.

A stage's autograd graph has a chain from its outputs to its inputs and, attached to it, the
weights:

    roots ← node ← node ← … ← inputs          the chain: nodes that an input's gradient passes
              ↑      ↑
              w₂     w₁                       pieces beside it, each held by one node of the chain

    input_gradients   runs the chain once and keeps, at each node that holds a piece, the gradients
                      that arrived there
    Weights           starts at those nodes again, each towards its own piece only: nothing of the
                      chain is computed twice

Two kinds of pieces are computed with the chain, and only added to `.grad` later. A piece that
several nodes hold (a tied weight, a weight that is used twice) would be reached twice by a second
start. A piece held by a Function written in Python (a compiled block too) has a backward that need
not run twice alike. Both halves together are the whole backward pass, exactly.

Source: Qi et al. 2023 (zero bubble pipelines), section 2; the graph's own links, as in
torch.distributed.pipelining, whose helper is private and follows a weight from one node only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


def input_gradients(
    roots: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[Gradients, WeightGradients]:
    """Run the first half: return the gradients of the inputs, and the work of the second half.

    Args:
        roots: edges of the outputs.
        seeds: gradients of the outputs.
        inputs: leaf tensors.

    Returns:
        One gradient per input, None if it has none, and the second half; no `.grad` has changed.
    """
    if not inputs or not roots:
        return tuple(None for _ in inputs), WeightGradients(list(roots), list(seeds))
    graph = _AutogradGraph(roots)
    chain = graph.ancestors_of([get_gradient_edge(leaf).node for leaf in inputs])
    early: list[torch.Tensor] = []
    late: dict[Node, list[torch.Tensor]] = {}
    for holders, leaves in graph.side_pieces(chain, {edge.node for edge in roots}):
        holder = holders[0] if len(holders) == 1 else None
        if holder is None or isinstance(holder, BackwardCFunction):
            early += leaves
        else:
            late.setdefault(holder, []).extend(leaves)
    starts = [_ChainNode(node, leaves) for node, leaves in late.items()]
    found = torch.autograd.grad(
        roots, [*inputs, *early], seeds, retain_graph=bool(starts), allow_unused=True
    )
    own, others = found[: len(inputs)], found[len(inputs) :]
    ready = [(leaf, g) for leaf, g in zip(early, others, strict=True) if g is not None]
    return own, WeightGradients([], [], starts, ready)


@dataclass
class WeightGradients:
    """The second half of a backward pass, to be run once.

    Attributes:
        roots, seeds: a whole backward pass, if no input needs a gradient.
        starts: nodes to start from.
        ready: gradients that are computed already.
    """

    roots: list[GradientEdge]
    seeds: list[torch.Tensor]
    starts: list[_ChainNode] = field(default_factory=list)
    ready: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def accumulate(self) -> None:
        """Add the gradients to `.grad`, through the hooks of the weights."""
        if self.roots:
            torch.autograd.backward(self.roots, self.seeds)
        for start in self.starts:
            start.run()
        for leaf, gradient in self.ready:
            with _GradientRecord(get_gradient_edge(leaf).node) as arriving:
                arriving.gradients = (gradient,)
                torch.autograd.backward([leaf], [gradient])
        self.roots, self.seeds, self.starts, self.ready = [], [], [], []


class _GradientRecord:
    """Record of the gradients that arrive at a node; if the node runs again, it gets the same ones.

    Hooks on a tensor change its gradient before the node sees it. They run at the second start too,
    on gradients that they have changed already; the result of that second change is dropped.
    """

    def __init__(self, node: Node) -> None:
        self.gradients: Gradients | None = None
        self.handle = node.register_prehook(self._record)

    def _record(self, now: Gradients) -> Gradients | None:
        if self.gradients is None:
            self.gradients = now
            return None
        return tuple(
            new if kept is None else kept for kept, new in zip(self.gradients, now, strict=True)
        )

    def __enter__(self) -> _GradientRecord:
        return self

    def __exit__(self, *failure: object) -> None:
        self.handle.remove()


class _ChainNode:
    """A node of the chain, from which the weights beside it get their gradients."""

    def __init__(self, node: Node, leaves: list[torch.Tensor]) -> None:
        self.node, self.leaves = node, leaves
        self.arriving = _GradientRecord(node)

    def run(self) -> None:
        """Run this node once more, towards its own weights only."""
        with self.arriving as arriving:
            came = [(i, g) for i, g in enumerate(arriving.gradients or ()) if g is not None]
            if came:
                edges = [GradientEdge(self.node, place) for place, _ in came]
                torch.autograd.backward(edges, [g for _, g in came], inputs=self.leaves)


class _AutogradGraph:
    """The nodes that can be reached from the roots, with their links both ways."""

    def __init__(self, roots: Iterable[GradientEdge]) -> None:
        self.below: dict[Node, list[Node]] = {}
        self.holders: dict[Node, list[Node]] = {}
        to_visit = [edge.node for edge in roots]
        while to_visit:
            node = to_visit.pop()
            if node in self.below:
                continue
            self.below[node] = [child for child, _ in node.next_functions if child is not None]
            for child in self.below[node]:
                self.holders.setdefault(child, []).append(node)
            to_visit += self.below[node]

    def ancestors_of(self, leaves: Iterable[Node]) -> set[Node]:
        """Return the given nodes and all nodes from which one of them can be reached."""
        found: set[Node] = set()
        to_visit = [leaf for leaf in leaves if leaf in self.below]
        while to_visit:
            node = to_visit.pop()
            if node not in found:
                found.add(node)
                to_visit += self.holders.get(node, [])
        return found

    def side_pieces(
        self, chain: set[Node], roots: set[Node]
    ) -> list[tuple[list[Node], list[torch.Tensor]]]:
        """Return connected pieces outside of the chain: (chain nodes that hold it, its leaves).

        A piece that contains a root counts as held by no node.
        """
        pieces, seen = [], set(chain)
        for first in self.below:
            if first in seen:
                continue
            holders: dict[Node, None] = {}
            leaves: list[torch.Tensor] = []
            is_root, to_visit = False, [first]
            seen.add(first)
            while to_visit:
                node = to_visit.pop()
                is_root |= node in roots
                leaf: Any = getattr(node, "variable", None)
                leaves += [leaf] if leaf is not None else []
                above = self.holders.get(node, [])
                holders.update((holder, None) for holder in above if holder in chain)
                beside = [n for n in (*self.below[node], *above) if n not in seen]
                seen.update(beside)
                to_visit += beside
            pieces.append(([] if is_root else list(holders), leaves))
        return pieces
