"""Applies a split to a model: parameters are cut in place, blocks run as their split graphs.

Every parameter object stays (optimizers and ties refer to it); its numbers become this rank's part.
The module tree and all names stay too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.base.errors import BugError
from shoal.base.shards import Box, Shard
from shoal.parallel.program import dtype_of
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labels import Label, Split, Tiled, Whole, boxes, cut, grid_place
from shoal.parallel.spmd.model_split import ModelSplit
from shoal.parallel.spmd.sequence import even_cuts
from shoal.parallel.spmd.stand_in import Programs, SplitForward
from shoal.parallel.tensor_parallel.vocabulary import install
from shoal.trace.stand_in import StandIn


@dataclass(frozen=True)
class Applied:
    """What a split did to a model.

    places    where this rank's part of every cut parameter lies in the whole one
    holders   how many ranks hold the same part of a parameter, unless it is one
    partial   parameters whose gradient must be summed over the ranks once a step
    undo      take the stand-ins away, in this order; parameters stay cut
    """

    places: dict[str, Shard] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    undo: tuple[Callable[[], None], ...] = ()


def apply_split(module: nn.Module, split: ModelSplit, axis: Axis) -> Applied:
    """Make `module`, whole and equal on every rank of `axis`, compute with this rank's parts.

    axis   as many ranks as the split is for
    """
    if axis.size != split.degree:
        raise BugError(f"a split for {split.degree} ranks was applied to {axis.size}")
    stand_ins: list[StandIn] = []
    for group in split.classes:
        programs = Programs(group.split, group.bare)
        programs.note(group.call.args, group.call.kwargs)
        for name in group.names:
            stand_ins.append(SplitForward(name, module.get_submodule(name), programs, axis))
    stand_ins += install(module, split.tables, axis, split.scattered)
    places: dict[str, Shard] = {}
    holders: dict[str, int] = {}
    for name, p in module.named_parameters():
        label = split.parameters[name].label
        shape = tuple(p.shape)
        if name in split.tables.split:
            cuts = even_cuts(shape[0], axis.size)
            start, stop = cuts[axis.rank], cuts[axis.rank + 1]
            held: tuple[Box, ...] = (((start, stop), *((0, n) for n in shape[1:])),)
            part = p.detach()[start:stop].clone()
        elif isinstance(label, Whole):
            holders[name] = axis.size
            continue
        else:
            held, holders[name] = _held(shape, label, axis)
            # Rows of a matrix are a view, which would keep all of it.
            part = cut(p.detach(), label, axis.rank, axis.size).clone()
        _set(p, part)
        places[name] = Shard(name, shape, dtype_of(p), held)
    partial = frozenset(name for name, one in split.parameters.items() if one.partial)
    return Applied(
        places,
        {name: count for name, count in holders.items() if count > 1},
        partial,
        tuple(one.take_away for one in reversed(stand_ins)),
    )


def _set(p: nn.Parameter, part: torch.Tensor) -> None:
    p.data = part
    p.grad = None


def _held(shape: tuple[int, ...], label: Label, axis: Axis) -> tuple[tuple[Box, ...], int]:
    """(boxes of this rank's part, how many ranks hold the same one)."""
    if isinstance(label, Split):
        return boxes(shape, label, axis.rank, axis.size), 1
    if not isinstance(label, Tiled):
        raise BugError(f"a parameter is labelled {label}")
    places = zip(grid_place(label, axis.rank), label.axes, strict=True)
    cuts = [(place, parts, one) for place, (parts, one) in places if isinstance(one, Split)]
    if len(cuts) != 1:
        raise BugError(f"a parameter is cut along {len(cuts)} axes: {label}")
    ((place, parts, one),) = cuts
    return boxes(shape, one, place, parts), axis.size // parts
