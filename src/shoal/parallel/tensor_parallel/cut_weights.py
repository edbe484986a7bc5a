"""Apply a split to a model: cut the parameters in place, run the blocks as their split graphs.

Every parameter object stays (optimizers and ties refer to it); its numbers become this rank's part.
The module tree and all names stay too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from shoal.base.errors import BugError
from shoal.base.plans.placement import DimCut, make_even_cut
from shoal.parallel.build.mmap_init import cut_to_part
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labelling.labels import Split, Tiled, grid_coordinates
from shoal.parallel.spmd.sequence_shards import compute_even_cuts
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.parallel.spmd.split_forward import ProgramCache, SplitForward
from shoal.trace.isolation.replaced_forward import ReplacedForward


def apply_split(module: nn.Module, split: ModelSplit, axis: Axis) -> list[Callable[[], None]]:
    """Make `module`, replicated on the ranks of `axis`, compute with this rank's parts.

    Args:
        axis: the ranks; as many as the degree of the split.

    Returns:
        functions that remove the replaced forwards, in this order; parameters stay cut.
    """
    if axis.size != split.degree:
        raise BugError(f"a split for {split.degree} ranks was applied to {axis.size}")
    stand_ins: list[ReplacedForward] = []
    for group in split.classes:
        programs = ProgramCache(group.split, group.bare)
        programs.register_sample(group.call.args, group.call.kwargs)
        for name in group.names:
            stand_ins.append(SplitForward(name, module.get_submodule(name), programs, axis))
    if split.tables.split:
        from shoal.parallel.tensor_parallel.vocabulary_parallel import replace_table_forwards

        stand_ins += replace_table_forwards(module, split.tables, axis, split.scattered)
    for name, p in module.named_parameters():
        cut = parameter_cut(name, tuple(p.shape), split)
        if cut is not None:
            cut_to_part(p, cut, axis.rank)
            p.grad = None
    return [one.restore for one in reversed(stand_ins)]


def parameter_cut(name: str, shape: tuple[int, ...], split: ModelSplit) -> DimCut | None:
    """Return how a split cuts a parameter; None if the parameter is replicated."""
    label, degree = split.parameters[name].label, split.degree
    if name in split.tables.split:  # the rows of a vocabulary need not divide evenly
        return DimCut("tp", 0, (compute_even_cuts(shape[0], degree),), tuple(range(degree)))
    if isinstance(label, Split):
        return make_even_cut("tp", label.dim, shape[label.dim], degree, groups=label.groups)
    if not isinstance(label, Tiled):
        return None
    cuts = [(k, parts, one) for k, (parts, one) in enumerate(label.axes) if isinstance(one, Split)]
    if len(cuts) != 1:
        raise BugError(f"a parameter is cut along {len(cuts)} axes: {label}")
    ((k, parts, one),) = cuts
    cut = make_even_cut("tp", one.dim, shape[one.dim], parts, groups=one.groups)
    return replace(cut, part=tuple(grid_coordinates(label, rank)[k] for rank in range(degree)))
