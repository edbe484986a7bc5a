"""Split one layer of a model over n ranks: the cut of each parameter, and the program to run.

    trace the layer as on one device → label every value → place sums → rewrite for one rank

The layer itself is never changed. `split_block` chooses how its parameters are cut;
`split_for_inputs` makes the program for inputs of other shapes, with the parameters cut in the same
way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Split, format_segments
from shoal.parallel.spmd.labelling.problem import LabellingProblem, parameter_shapes
from shoal.parallel.spmd.labelling.rules import RuleCache
from shoal.parallel.spmd.labelling.summed_gradients import GradientSumPlaces, choose_gradient_sums
from shoal.parallel.spmd.rewrite import AxisDivision, BlockCollective, Shared, write_program
from shoal.trace.find.vocabulary_use import VocabularyTables
from shoal.trace.graph.layer_graph import (
    LayerGraph,
    UntraceableLayer,
    shared_attention,
    trace_layer,
)
from shoal.trace.isolation.layer_calls import LayerCall

SUMMED = "; its gradient is summed over the ranks once a step"

RULES = RuleCache()
"""Rules found in this process: equal layers need the same rules."""


@dataclass(frozen=True)
class BlockSplit:
    """Split of one layer over `degree` ranks, for one kind of input.

    Attributes:
        parameters: the label of each cut parameter, by its name in the layer; others are whole.
        partial: whole parameters whose gradient is a part on every rank, to be summed once a step.
        summed: parameters whose gradients are summed over the ranks once a step: those that are
            `partial` for the sample's kind of input, and all if only the sequence is split.
        inputs: labels of the flattened tensor arguments (without None and numbers).
        outputs: labels of the flattened tensor results. A later one may be Split(d) without
            sequence parallelism: return it as a tensor that gathers itself when it is read.
        run: `run(axis, *local parameters, *local buffers, *inputs)` returns the flat outputs.
        exchanges: collectives of one forward and backward pass, in the order of the graph.
        reasons: why each parameter is cut or whole, one line each.
        gathered: values that could not stay split, one line each: costly, and only for overrides.
        shapes: whole shapes of the parameters, in the order in which `run` takes them.
        buffers: names of the buffers, in the order in which `run` takes them.
        written: buffers of which each rank writes a part, which is gathered past the version
            counter. BatchNorm's are left out: it does not count its writes either.
        flatten: (args, kwargs) → the flat tensor inputs.
        rebuild: flat outputs → the return value of the layer's forward.
        attention: function with which the ranks compute attention together.
        labelling: first labelling of a pure sequence split: it serves other lengths too.
        inner: division of each rank's part over another axis; `run` then takes both axes, and
            `inputs` and `outputs` of both splits apply in turn.
        opaque: parts of the layer that are one operation each of its graph.
    """

    degree: int
    parameters: dict[str, Split]
    partial: frozenset[str]
    inputs: tuple[Label, ...]
    outputs: tuple[Label, ...]
    run: torch.fx.GraphModule
    exchanges: tuple[BlockCollective, ...]
    reasons: dict[str, str]
    gathered: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    buffers: tuple[str, ...]
    written: frozenset[str]
    sequence_dim: int | None
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor]]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]
    attention: Shared | None = None
    labelling: Labelling | None = None
    inner: BlockSplit | None = None
    summed: frozenset[str] = frozenset()
    opaque: tuple[str, ...] = ()


def split_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    degree: int,
    *,
    sequence_dim: int | None = None,
    overrides: Mapping[str, str] | None = None,
    split_parameters: bool = True,
    attention: Shared | None = None,
    inner: BlockSplit | None = None,
    opaque: bool = True,
) -> BlockSplit:
    """Choose how a layer's parameters are cut over `degree` ranks, and make its program.

    Args:
        args, kwargs: a sample call: shapes, types, the values of integers and booleans, and
            which floating inputs require gradients (they decide which backward sums are counted).
        sequence_dim: sequence parallelism: the first floating input and outputs of its shape are
            Split(sequence_dim).
        overrides: name pattern (relative to the layer) → "whole" │ "column" │ "row".
        split_parameters: False: all parameters stay whole, and with a sequence_dim only the
            sequence is split (context parallelism: keys and values are gathered).
        attention: function that computes attention from the ranks' parts, instead of a gather.
        inner: split of the layer over another axis, which keeps its cut parameters; only with
            `split_parameters` False.
        opaque: untraceable parts become one operation each, if their parameters are split.

    Raises:
        Untraceable: the layer cannot be split; the text is the reason.
        IndivisibleSequence: the sequence does not divide: use plain tensor parallelism then.
    """
    if split_parameters and opaque:
        from shoal.trace.graph.opaque_parts import trace_with_opaque  # tp alone

        traced = trace_with_opaque(block, args, kwargs)
    else:
        masks = not split_parameters
        traced = trace_layer(block, args, kwargs, masks=masks, shared=attention is not None)
    problem = LabellingProblem(traced, RULES, degree, sequence_dim)
    fixed = None if split_parameters else dict.fromkeys(traced.parameters, WHOLE)
    labelling, whole = _solve_problem(problem, overrides=overrides, fixed=fixed)
    if traced.opaque:
        from shoal.parallel.spmd.labelling.opaque_weights import check_split

        check_split(traced.opaque, labelling.parameters)
    if attention is not None and not _all_shared(labelling):
        return split_block(  # with masks written out
            block,
            args,
            kwargs,
            degree,
            sequence_dim=sequence_dim,
            overrides=overrides,
            split_parameters=split_parameters,
            inner=inner,
        )
    outer = AxisDivision(labelling, choose_gradient_sums(labelling))
    of_sequence = sequence_dim is not None and not split_parameters
    made = _make_split(traced, outer, whole, attention, inner, keeps=of_sequence)
    return replace(made, summed=made.partial if split_parameters else frozenset(made.shapes))


def split_for_inputs(
    split: BlockSplit, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> BlockSplit:
    """Make the program for another kind of input, with the parameters cut as in `split`.

    The layer may hold the parts of its parameters now. Floating inputs only show shapes and types.

    Raises:
        Untraceable: the layer cannot be traced, or does not work on parts of these inputs.
        IndivisibleSequence: the sequence does not divide.
    """
    masks = split.sequence_dim is not None and not split.parameters
    shared = split.attention is not None
    if split.opaque:
        from shoal.trace.graph.opaque_parts import trace_with_opaque

        traced = trace_with_opaque(block, args, kwargs, split.shapes, split.opaque)
    else:
        traced = trace_layer(block, args, kwargs, split.shapes, masks=masks, shared=shared)
    labelling = _relabel(split, traced, split.sequence_dim)
    if shared and not _all_shared(labelling):
        return split_for_inputs(replace(split, attention=None), block, args, kwargs)
    outer = AxisDivision(labelling, choose_gradient_sums(labelling, split.summed))
    made = _make_split(traced, outer, {}, split.attention, split.inner)
    return replace(made, summed=split.summed)


def _relabel(
    split: BlockSplit, traced: LayerGraph, sequence_dim: int | None, *, shares: bool = True
) -> Labelling:
    """Label another graph of the layer, with its parameters cut as in `split`.

    Args:
        shares: see `LabellingProblem`.

    Raises:
        Untraceable, IndivisibleSequence: as `split_for_inputs`.
    """
    problem = LabellingProblem(traced, RULES, split.degree, sequence_dim, shares=shares)
    if split.labelling is not None:
        from shoal.parallel.spmd.labelling.analogy import (
            transfer_labels,  # only needed for split sequences
        )

        if alike := transfer_labels(split.labelling, problem):
            return alike
    fixed: dict[str, Label] = {name: split.parameters.get(name, WHOLE) for name in split.shapes}
    lazy = frozenset(k for k, label in enumerate(split.outputs) if label != WHOLE)
    labelling, _ = _solve_problem(problem, fixed=fixed, lazy=lazy)
    # A sum that is costly for few tokens is still correct.
    if sum(not one.dear for one in labelling.conflicts) > len(split.gathered):
        shapes = ", ".join(str(list(t.shape)) for t in traced.inputs)
        raise UntraceableLayer(
            f"inputs {shapes} do not work with the parameters cut as they are: "
            f"{_describe_gathers(labelling)[0]}"
        )
    return labelling


def _divide_inside(traced: LayerGraph, outer: Labelling, inner: BlockSplit) -> AxisDivision:
    """Divide the outer axis's sequence parts of a layer over the inner axis."""
    along, parts = inner.sequence_dim, outer.problem.degree * inner.degree
    hidden = next((t for t in traced.inputs if t.is_floating_point()), None)
    if along is not None and (hidden is None or hidden.shape[along] % parts):
        along = None  # whole sequences, of the outer axis's parts
    labelling = _relabel(inner, traced, along, shares=False)
    return AxisDivision(labelling, choose_gradient_sums(labelling, inner.summed))


def _solve_problem(
    problem: LabellingProblem,
    *,
    overrides: Mapping[str, str] | None = None,
    fixed: Mapping[str, Label] | None = None,
    lazy: frozenset[int] = frozenset(),
) -> tuple[Labelling, dict[str, str]]:
    """Solve a labelling problem; restore the random state and free the experiments' tensors.

    Args:
        fixed, lazy: labels of parameters, and outputs that stay split, if they are decided.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            if fixed is not None:
                return Labelling(problem, {}, fixed, lazy), {}
            from shoal.parallel.spmd.labelling.solve import (
                solve_labelling,  # cp has nothing to choose
            )

            return solve_labelling(problem, overrides)
        finally:
            RULES.free_tensors()


def _make_split(
    traced: LayerGraph,
    outer: AxisDivision,
    whole: Mapping[str, str],
    attention: Shared | None,
    inner: BlockSplit | None,
    *,
    keeps: bool = False,
) -> BlockSplit:
    """Make one rank's program; `keeps`: keep the labels for other lengths of the sequence."""
    divisions = [outer]
    if inner is not None:
        divisions.append(_divide_inside(traced, outer.labelling, inner))
    run, exchanges = write_program(divisions, attention)
    made = [
        _describe_split(traced, one, run, told, whole)
        for one, told in zip(divisions, exchanges, strict=True)
    ]
    if inner is not None:
        known = inner.labelling or divisions[1].labelling
        made[1] = replace(made[1], labelling=known, summed=inner.summed)
    return replace(
        made[0],
        attention=attention,
        labelling=outer.labelling if keeps else None,
        inner=made[1] if inner is not None else None,
    )


def _list_written(labelling: Labelling) -> frozenset[str]:
    """Return the names of the buffers of which each rank writes a part, without BatchNorm's."""
    problem = labelling.problem
    return frozenset(
        problem.buffers[buffer]
        for node, step in labelling.steps.items()
        for place in step.rule.writes
        if step.wants[place] != WHOLE
        and "batch_norm" not in str(node.target)
        and (buffer := problem.input_nodes(node)[place]) in problem.buffers
    )


def _describe_split(
    traced: LayerGraph,
    division: AxisDivision,
    run: torch.fx.GraphModule,
    exchanges: tuple[BlockCollective, ...],
    whole: Mapping[str, str],
) -> BlockSplit:
    """Describe a program over one of its axes as a `BlockSplit`."""
    labelling, sums = division.labelling, division.sums
    problem = labelling.problem
    cuts = {
        name: label
        for name in traced.parameters
        if isinstance(label := labelling.parameters.get(name, WHOLE), Split)
    }
    partial = _list_partial(problem, sums, cuts)
    return BlockSplit(
        degree=problem.degree,
        parameters=cuts,
        partial=partial,
        inputs=tuple(labelling.labels[node] for node in problem.inputs),
        outputs=tuple(label for _, label in labelling.outputs),
        run=run,
        exchanges=exchanges,
        reasons={
            name: describe_parameter(labelling, name, whole) + (SUMMED if name in partial else "")
            for name in traced.parameters
        },
        gathered=_describe_gathers(labelling),
        shapes=dict(parameter_shapes(problem)),
        buffers=tuple(traced.buffers),
        written=_list_written(labelling),
        sequence_dim=problem.sequence_dim,
        flatten=traced.flatten,
        rebuild=traced.rebuild,
        opaque=traced.opaque,
    )


def describe_parameter(labelling: Labelling, name: str, reasons: Mapping[str, str]) -> str:
    """Return one line on how a parameter is distributed over the ranks, and why."""
    label = labelling.parameters.get(name, WHOLE)
    if isinstance(label, Split):
        return f"{labelling.roles.get(name, 'column')}: dim {label.dim}{format_segments(label)}"
    if labelling.roles.get(name) == "once":
        return "whole: rank 0 adds it"
    return reasons.get(name, "whole: it meets no value that is split along it")


def _all_shared(labelling: Labelling) -> bool:
    """Return whether all sharable attention is shared; otherwise masks must be written out."""
    return all(
        step.rule.joint for node, step in labelling.steps.items() if node.target is shared_attention
    )


def _describe_gathers(labelling: Labelling) -> tuple[str, ...]:
    found = []
    for one in labelling.conflicts:
        shape = "×".join(str(n) for n in one.value.meta["val"].shape)
        found.append(f"{one.node.name} needs all of {one.value.name} [{shape}] on every rank")
    return tuple(found)


def _list_partial(
    problem: LabellingProblem, sums: GradientSumPlaces, cuts: Mapping[str, Split]
) -> frozenset[str]:
    return frozenset(
        name
        for node, name in problem.parameters.items()
        if (node, "own") in sums.parts and name not in cuts and node in problem.traced.trained
    )


@dataclass(frozen=True)
class ParameterSplit:
    """Part of one parameter that a rank holds.

    Attributes:
        label: Split: a part; Whole: the whole parameter.
        partial: whole, but its gradient is a part on every rank: to be summed over tp once a step.
        reason: one line.
    """

    label: Label
    partial: bool
    reason: str


@dataclass(frozen=True)
class BlockClass:
    """Class of equal layers that are split in the same way.

    Attributes:
        names: names of the layers in the model.
        split: split for the sample's kind of input.
        bare: a copy of one of them without numbers, for tracing other kinds of input.
        call: the sample's call of the first layer.
    """

    names: tuple[str, ...]
    split: BlockSplit
    bare: nn.Module
    call: LayerCall


@dataclass(frozen=True)
class ModelSplit:
    """Split of a model over `degree` ranks.

    Attributes:
        sequence: blocks pass each other parts of the sequence where they can.
        classes: classes of split layers.
        tables: split embeddings and heads.
        parameters: every parameter by its first name.
        exchanges: collectives of a forward and backward pass on the sample, by module.
        notices: parts that stay whole against expectation, one line each.
        scattered: embeddings that pass their rank's part of the sequence to the first block.
        calls: the sample's calls of the layers, without numbers.
    """

    degree: int
    sequence: bool
    classes: tuple[BlockClass, ...]
    tables: VocabularyTables
    parameters: dict[str, ParameterSplit]
    exchanges: dict[str, tuple[BlockCollective, ...]]
    notices: tuple[str, ...]
    scattered: frozenset[str] = frozenset()
    calls: dict[str, LayerCall] = field(default_factory=dict)
