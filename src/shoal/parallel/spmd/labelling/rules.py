"""Find how an operation acts on parts of tensors by running it, without a table of operations.

The operation runs once on whole random tensors and once per rank on that rank's parts. `outcome.py`
reads off how the results make up the whole result. Integers among the arguments may be sizes of the
whole tensor: if the operation fails as it stands, some of them are divided. Large tensors are tried
at smaller sizes; equal sizes stay equal.

Source: EasyDist's discovery (alibaba/easydist), with segments, grids and divided arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.labelling.experiment import (
    Experiment,
    OperationCall,
    OperationInput,
    run_call,
)
from shoal.parallel.spmd.labelling.labels import (
    PARTIAL,
    WHOLE,
    Label,
    Partial,
    Split,
    Tiled,
    cut_tensor,
    divides,
)
from shoal.parallel.spmd.labelling.node_arguments import (
    Edit,
    divide_arguments,
    enumerate_edits,
    list_integers,
    replace_integers,
)
from shoal.parallel.spmd.labelling.outcome import infer_labels, is_average
from shoal.trace.graph.layer_graph import is_reference, shared_attention

LARGE = 1 << 18
"""Number of elements in a call's tensors above which smaller sizes are tried."""

TOO_MANY = 1 << 26
"""Largest number of elements of an opaque part that rules try at full size."""

KEPT = 16
"""Largest number of experiments in memory: they hold tensors."""

DROPOUTS = frozenset({torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default})
"""Random operations whose mask can be drawn whole and then cut."""


@dataclass(frozen=True)
class LabelRule:
    """Label of an operation's result, and the changes to its call that produce it.

    Attributes:
        out: a label, or one for each of several results.
        edits: the integer arguments to divide.
        masked: the operation is dropout: each rank takes its part of the whole mask.
        writes: positions of buffers that the operation changes.
        averaged: the ranks' results average to the whole one: summed, each divided by their number.
        joint: attention that the ranks compute together, each with its part of the sequence.
    """

    out: Label | tuple[Label, ...]
    edits: tuple[Edit, ...] = ()
    masked: bool = False
    writes: tuple[int, ...] = ()
    averaged: bool = False
    joint: bool = False


class RuleCache:
    """Cache of rules by call and labels, for all layers of a model."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], LabelRule | None] = {}
        self._experiments: dict[OperationCall, Experiment | None] = {}

    def find(
        self,
        call: OperationCall,
        labels: tuple[Label, ...],
        degree: int,
        once: frozenset[int] = frozenset(),
    ) -> LabelRule | None:
        """Return the rule for inputs with these labels, or None if the ranks' results do not fit.

        Args:
            once: positions of tensors that rank 0 alone passes; the other ranks pass zeros.
        """
        key = (call, labels, degree, once)
        if key not in self.known:
            self.known[key] = self._search(call, labels, degree, once)
        return self.known[key]

    def free_tensors(self) -> None:
        """Keep the rules and free the tensors of the experiments."""
        self._experiments.clear()

    def _search(
        self, call: OperationCall, labels: tuple[Label, ...], degree: int, once: frozenset[int]
    ) -> LabelRule | None:
        if not _is_possible(call, labels, degree):
            return None
        if (
            call.target is shared_attention
            and (rule := _joint_attention_rule(call, labels)) is not None
        ):
            return rule
        if sum(value.elements for value in call.values) > LARGE:
            small = _shrink_call(call, labels, degree)
            if small is None and is_reference(call.target):
                from shoal.trace.graph.opaque_parts import shrink_call  # which made the call

                small = shrink_call(call, degree)
                if small is None and sum(value.elements for value in call.values) > TOO_MANY:
                    return None
            if (
                small is not None
                and _is_possible(small, labels, degree)
                and self._experiment(small)
            ):
                found = self._try(small, labels, degree, once)
                if found is None or not found.edits or _fits(call, labels, degree, found):
                    return found
        return self._try(call, labels, degree, once)

    def _experiment(self, call: OperationCall) -> Experiment | None:
        if call not in self._experiments:
            if len(self._experiments) >= KEPT:
                self.free_tensors()
            self._experiments[call] = Experiment.of(call)
        return self._experiments[call]

    def _try(
        self, call: OperationCall, labels: tuple[Label, ...], degree: int, once: frozenset[int]
    ) -> LabelRule | None:
        whole = self._experiment(call)
        if whole is None:
            return None
        if whole.draws:
            cannot = call.target not in DROPOUTS or isinstance(labels[0], Partial)
            return None if cannot else LabelRule(labels[0], masked=True)
        held = [whole.rank_inputs(labels, once, 0, degree)]
        for edit in enumerate_edits(call.template, degree, list_grid_degrees(labels, degree)):
            template = divide_arguments(call.template, edit)
            results = [whole.rerun(template, held[0], labels, 0, degree)]
            if results[0] is None:
                continue
            if len(held) == 1:
                held += [whole.rank_inputs(labels, once, rank, degree) for rank in range(1, degree)]
            for rank in range(1, degree):
                results.append(whole.rerun(template, held[rank], labels, rank, degree))
            if any(result is None for result in results):
                continue
            shapes = [value.shape for value in call.values]
            out = infer_labels(whole.result, results, labels, degree, shapes)
            if out is not None:
                return LabelRule(out, edit, writes=tuple(sorted(whole.changed)))
            if is_average(whole.result, results) and not whole.changed:
                return LabelRule(PARTIAL, edit, averaged=True)
        return None


def _is_possible(call: OperationCall, labels: tuple[Label, ...], degree: int) -> bool:
    """Return whether tensors of these shapes and dtypes can have these labels."""
    for value, label in zip(call.values, labels, strict=True):
        if isinstance(label, Partial) and not value.dtype.is_floating_point:
            return False
        for parts, one in label.axes if isinstance(label, Tiled) else ((degree, label),):
            if isinstance(one, Split) and not divides(value.shape[one.dim], one.groups, parts):
                return False
    return True


def _joint_attention_rule(call: OperationCall, labels: tuple[Label, ...]) -> LabelRule | None:
    """Return the rule of attention on sequence parts: no rank needs to see all tokens.

    A rank has the mask rows of its queries, or the whole mask where one row serves all queries.
    """
    along = Split(len(call.values[0].shape) - 2)
    if any(label != along for label in labels[:3]):
        return None
    for value, label in zip(call.values[3:], labels[3:], strict=True):
        dim = len(value.shape) - 2
        if label != (Split(dim) if value.shape[dim] > 1 else WHOLE):
            return None
    return LabelRule(along, joint=True)


def list_grid_degrees(labels: Sequence[Label | None], degree: int) -> list[int]:
    """Return outer degrees of rank grids to try: that of a tiled label, else every divisor.

    >>> list_grid_degrees([], 8)
    [2, 4]
    """
    tiled = [label.axes[0][0] for label in labels if isinstance(label, Tiled)]
    return tiled[:1] or [k for k in range(2, degree) if degree % k == 0]


def _shrink_call(call: OperationCall, labels: Sequence[Label], degree: int) -> OperationCall | None:
    """Return the same call at smaller sizes, equal ones staying equal; None if values are known.

    Numbers above 4, which are more than a dim's number, must be sizes and become smaller with them.
    """
    if call.buffers or any(value.known is not None for value in call.values):
        return None
    if call.target is torch.ops.aten.reshape.default:
        return _shrink_reshape(call, labels, degree)
    sizes = {n for value in call.values for n in value.shape}
    numbers = {n for _, n in list_integers(call.template) if n > 4}
    if not numbers <= sizes:
        return None
    small = _shrink_sizes(sorted(sizes), degree, _size_multiples(call, labels))
    return _with_shapes(
        call,
        [tuple(small[n] for n in value.shape) for value in call.values],
        replace_integers(call.template, {n: small[n] for n in numbers}),
    )


def _shrink_reshape(
    call: OperationCall, labels: Sequence[Label], degree: int
) -> OperationCall | None:
    """Return a reshape with smaller leading and trailing dims, where it keeps these dims."""
    args, kwargs = call.template
    shape, wanted = call.values[0].shape, tuple(args[1])
    pairs = list(zip(shape, wanted, strict=False))
    first = next((k for k, (n, m) in enumerate(pairs) if n != m), len(pairs))
    ends = list(zip(reversed(shape[first:]), reversed(wanted[first:]), strict=False))
    last = next((k for k, (n, m) in enumerate(ends) if n != m), len(ends))
    kept = sorted({*shape[:first], *(shape[len(shape) - last :])})
    inner = {*shape[first : len(shape) - last], *wanted[first : len(wanted) - last]}
    small = _shrink_sizes(kept, degree, _size_multiples(call, labels), besides=inner)

    def shrunk(sizes: tuple[int, ...]) -> tuple[int, ...]:
        middle = sizes[first : len(sizes) - last]
        ends = (sizes[:first], sizes[len(sizes) - last :])
        return (*(small[n] for n in ends[0]), *middle, *(small[n] for n in ends[1]))

    return _with_shapes(call, [shrunk(shape)], ([args[0], list(shrunk(wanted)), *args[2:]], kwargs))


def _size_multiples(call: OperationCall, labels: Sequence[Label]) -> dict[int, int]:
    """Return by size the factor that a dim cut in segments must keep, apart from the ranks."""
    units: dict[int, int] = {}
    for value, label in zip(call.values, labels, strict=True):
        for _, one in label.axes if isinstance(label, Tiled) else ((0, label),):
            if isinstance(one, Split):
                size = value.shape[one.dim]
                count = one.groups if isinstance(one.groups, int) else sum(one.groups)
                units[size] = math.lcm(units.get(size, 1), count)
    return units


def _shrink_sizes(
    sizes: Sequence[int], degree: int, units: Mapping[int, int], besides: Collection[int] = ()
) -> dict[int, int]:
    """Return smaller sizes that can be cut like the old ones; different sizes stay different."""
    taken = {*besides, *sizes}  # by sizes that may stay as they are
    small: dict[int, int] = {}
    multiple = 4
    for n in sizes:
        while multiple % units.get(n, 1) or (multiple * degree in taken and multiple * degree < n):
            multiple += 1
        if n <= multiple * degree or n % degree:
            small[n] = n
        else:
            small[n] = multiple * degree
            multiple += 1
    return small


def _with_shapes(
    call: OperationCall, shapes: Sequence[tuple[int, ...]], template: Any
) -> OperationCall:
    values = tuple(OperationInput(s, v.dtype) for s, v in zip(shapes, call.values, strict=True))
    return replace(call, arguments=repr(template), template=template, values=values)


def _fits(call: OperationCall, labels: tuple[Label, ...], degree: int, rule: LabelRule) -> bool:
    """Return whether a rule found at smaller sizes gives each rank results of the right shapes."""
    whole = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in call.values]
    result, template = (
        run_call(call, call.template, whole),
        divide_arguments(call.template, rule.edits),
    )
    if result is None:
        return False
    wholes = pytree.tree_leaves(result)
    outs = rule.out if isinstance(rule.out, tuple) else (rule.out,) * len(wholes)
    for rank in range(degree):
        held = [cut_tensor(t, label, rank, degree) for t, label in zip(whole, labels, strict=True)]
        mine = pytree.tree_leaves(run_call(call, template, held))
        wanted = [cut_tensor(t, label, rank, degree) for t, label in zip(wholes, outs, strict=True)]
        if [t.shape for t in wanted] != [getattr(t, "shape", None) for t in mine]:
            return False
    return True
