"""Labels: the part of a tensor that each of n ranks holds (all of it, a slice, or a summand).

    Whole            every rank holds the tensor
    Split(d, g)      dim d is cut into g segments, and every segment into n equal parts; rank r
                     holds part r of each segment, one after another (g = 3: fused q, k and v;
                     g = (4, 1, 1): four times as many heads of q as of k and of v)
    Partial          every rank holds a tensor of the full shape; their sum is the tensor
    Tiled(…)         the ranks form a grid; each of its axes has a label of its own (4 ranks that
                     share 2 key/value heads: 2 × 2, the outer axis splits, the inner one does not)

Source: the placements of GSPMD (Xu et al. 2021, 2105.04663) and DTensor, with segments added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.base.errors import PlanError
from shoal.base.plans.placement import Groups, segment_sizes


@dataclass(frozen=True)
class Whole:
    """Label of a replicated tensor: every rank holds all of it."""


@dataclass(frozen=True)
class Split:
    """Label of a sharded tensor: rank r holds part r of each of the `groups` segments of `dim`."""

    dim: int
    groups: Groups = 1


@dataclass(frozen=True)
class Partial:
    """Label of a tensor that is the sum of the ranks' tensors."""


@dataclass(frozen=True)
class Tiled:
    """Label on a grid of ranks: (degree, Whole or Split) for each axis, the outermost first."""

    axes: tuple[tuple[int, Whole | Split], ...]


Label = Whole | Split | Partial | Tiled

WHOLE = Whole()
PARTIAL = Partial()


def divides(size: int, groups: Groups, degree: int) -> bool:
    """Return whether each segment of a dim of this size can be cut into `degree` equal parts.

    >>> divides(12, 3, 2), divides(12, 3, 8), divides(16, (2, 1, 1), 4), divides(8, (2, 1, 1), 4)
    (True, False, True, False)
    """
    sizes = segment_sizes(size, groups)
    return size > 0 and bool(sizes) and all(n % degree == 0 for n in sizes)


def count_segments(groups: Groups) -> int:
    """Return the number of segments."""
    return groups if isinstance(groups, int) else len(groups)


def format_segments(label: Label) -> str:
    """Format the segments of a label for messages; an empty string for one segment.

    >>> (
    ...     format_segments(Split(0, 3)),
    ...     format_segments(Split(0, (4, 1, 1))),
    ...     format_segments(Split(0)),
    ... )
    (' in 3 segments', ' in segments of 4 : 1 : 1', '')
    """
    groups = label.groups if isinstance(label, Split) else 1
    if isinstance(groups, int):
        return f" in {groups} segments" if groups > 1 else ""
    return f" in segments of {' : '.join(str(share) for share in groups)}"


def cut_tensor(tensor: Tensor, label: Label, rank: int, degree: int) -> Tensor:
    """Return the part of a whole tensor that a rank holds: contiguous, maybe a view.

    Raises:
        PlanError: the dim does not divide into the label's parts.
    """
    if isinstance(label, Tiled):
        for position, (parts, inner) in zip(grid_coordinates(label, rank), label.axes, strict=True):
            tensor = cut_tensor(tensor, inner, position, parts)
        return tensor
    if not isinstance(label, Split):
        return tensor
    dim, groups = label.dim, label.groups
    size = tensor.shape[dim]
    if not divides(size, groups, degree):
        least = min(segment_sizes(size, groups) or (size // count_segments(groups),))
        raise PlanError(
            f"a dim of size {size}{format_segments(label)} does not divide into {degree} equal "
            "parts; "
            f"try: a degree that divides {least}"
        )
    if isinstance(groups, int):
        width = size // (groups * degree)
        parts = tensor.unflatten(dim, (groups, degree, width)).select(dim + 1, rank)
        return parts.flatten(dim, dim + 1).contiguous()
    segments = tensor.split(segment_sizes(size, groups), dim)
    return torch.cat([segment.chunk(degree, dim)[rank] for segment in segments], dim)


def join_parts(shards: Sequence[Tensor], label: Label) -> Tensor:
    """Join the parts of all ranks, in the order of the ranks, to the whole tensor."""
    if isinstance(label, Tiled):
        for parts, inner in reversed(label.axes):
            rows = [shards[k : k + parts] for k in range(0, len(shards), parts)]
            shards = [join_parts(row, inner) for row in rows]
        return shards[0]
    if isinstance(label, Partial):
        return torch.stack(list(shards)).sum(0)
    if isinstance(label, Split):
        if label.groups == 1:
            return torch.cat(list(shards), label.dim)
        if isinstance(label.groups, int):
            width = shards[0].shape[label.dim] // label.groups
            pieces = [shard.unflatten(label.dim, (label.groups, width)) for shard in shards]
            return torch.stack(pieces, label.dim + 1).flatten(label.dim, label.dim + 2)
        widths = segment_sizes(shards[0].shape[label.dim], label.groups)
        held = [shard.split(widths, label.dim) for shard in shards]  # [rank][segment]
        return torch.cat([part for same in zip(*held, strict=True) for part in same], label.dim)
    return shards[0]


def grid_coordinates(label: Tiled, rank: int) -> tuple[int, ...]:
    """Return a rank's coordinates in the label's grid, the last axis fastest.

    >>> grid_coordinates(Tiled(((2, Split(0)), (2, Whole()))), 3)
    (1, 1)
    """
    place = []
    for parts, _ in reversed(label.axes):
        place.append(rank % parts)
        rank //= parts
    return tuple(reversed(place))
