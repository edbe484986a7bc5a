"""Arithmetic on boxes: the part of a tensor that a slice is, and the overlap of two slices.

A box is one (start, stop) per dim of the global tensor. Resharding is nothing but overlaps: a
wanted box is filled from every stored box that it meets. That works only if the stored boxes tile
the tensor, which `explain_untiled` checks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.plans.tensor_shards import Box


@dataclass(frozen=True)
class Patch:
    """A box within flat memory: its first element, and its strides.

    Attributes:
        strides: in elements, per dim of the box.
    """

    box: Box
    begin: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return extents(self.box)


@functools.lru_cache(64)  # a weight, its gradient and its moments have the same boxes
def merge_boxes(slices: tuple[Box, ...]) -> tuple[Patch, ...]:
    """Merge boxes that are stored one after another into strided patches where they are thin.

    A weight whose columns are cut within segments (q, k and v in one, transposed) is held as one
    box per row and segment: thousands of slices that one patch per segment describes.

    >>> [patch.box for patch in merge_boxes((((0, 1), (2, 4)), ((1, 2), (2, 4))))]
    [((0, 2), (2, 4))]
    >>> rows = tuple(((k, k + 1), part) for k in range(5) for part in ((0, 2), (6, 8)))
    >>> merge_boxes(rows)[1]
    Patch(box=((0, 5), (6, 8)), begin=2, strides=(4, 1))
    """
    found: list[Patch] = []
    begin = 0
    for box in slices:
        found.append(Patch(box, begin, _dense_strides(extents(box))))
        begin += elements(box)
    for dim in reversed(range(len(slices[0]) if len(slices) > 1 else 0)):
        found = _merge_along(found, dim)
    return tuple(found)


def _merge_along(found: list[Patch], dim: int) -> list[Patch]:
    """Merge patches that follow each other along `dim`, evenly spaced in memory.

    Only thin ones (of extent 1): which boxes make one must not depend on what else a rank holds,
    or else ranks that hold copies of a box would not offer the same box.
    """
    rows: dict[tuple[Box, tuple[int, ...]], list[Patch]] = {}
    for patch in found:
        before, (start, stop), after = patch.box[:dim], patch.box[dim], patch.box[dim + 1 :]
        thick = (start, stop) if stop - start != 1 else (-1, -1)
        rest = (*patch.strides[:dim], *patch.strides[dim + 1 :])
        rows.setdefault(((*before, thick, *after), rest), []).append(patch)
    done: list[Patch] = []
    for row in rows.values():
        run = [row[0]]
        for patch in row[1:]:
            follows = patch.box[dim] == (run[-1].box[dim][1], run[-1].box[dim][1] + 1)
            spaced = len(run) == 1 or patch.begin - run[-1].begin == run[1].begin - run[0].begin
            if not (follows and spaced):
                done.append(_merge_run(run, dim))
                run = []
            run.append(patch)
        done.append(_merge_run(run, dim))
    return sorted(done, key=lambda patch: patch.begin)


def _merge_run(run: list[Patch], dim: int) -> Patch:
    first = run[0]
    if len(run) == 1:
        return first
    span = (first.box[dim][0], run[-1].box[dim][1])
    strides = list(first.strides)
    strides[dim] = run[1].begin - first.begin
    return Patch((*first.box[:dim], span, *first.box[dim + 1 :]), first.begin, tuple(strides))


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extents(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def elements(box: Box) -> int:
    """Return the number of elements in a box; a scalar's box () holds one.

    >>> elements(((0, 4), (2, 5))), elements(())
    (12, 1)
    """
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor of this shape."""
    return tuple((0, n) for n in shape)


def format_box(box: Box, shape: Sequence[int]) -> str:
    """Return a box as Python slices, a full dim as `:`; empty for a scalar.

    >>> format_box(((0, 512), (0, 8)), (1024, 8))
    '[0:512, :]'
    """
    parts = [
        ":" if (start, stop) == (0, n) else f"{start}:{stop}"
        for (start, stop), n in zip(box, shape, strict=True)
    ]
    return f"[{', '.join(parts)}]" if parts else ""


def format_slice(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return a tensor's name with its slice, as messages show it."""
    return f"{name} {format_box(box, shape)}".rstrip()


def overlap(one: Box, other: Box) -> Box | None:
    """Return the overlap of two boxes of one tensor, or None.

    >>> overlap(((0, 4), (0, 2)), ((3, 9), (1, 2)))
    ((3, 4), (1, 2))
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def index_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of `box` within an array that holds `outer`.

    >>> index_within(((3, 4),), ((2, 6),))
    (slice(1, 2, None),)
    """
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box lies within a tensor of this shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
    )


def explain_untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why boxes do not tile the tensor (every element exactly once), or None if they do.

    Sweeps along the dim with most cuts, so n boxes cut along one dim cost n log n.

    >>> explain_untiled((4,), [((0, 2),), ((2, 4),)]) is None
    True
    >>> explain_untiled((4,), [((0, 2),), ((1, 4),)])
    'slices [0:2] and [1:4] overlap'
    >>> explain_untiled((4, 2), [((0, 3), (0, 2))])
    'slices hold 6 of 8 elements'
    """
    for box in boxes:
        if not fits(box, shape):
            return f"slice {list(box)} lies outside shape {list(shape)}"
    if shape:
        cuts = [len({box[dim] for box in boxes}) for dim in range(len(shape))]
        dim = cuts.index(max(cuts))
        active: list[Box] = []
        for box in sorted(boxes, key=lambda b: b[dim]):
            active = [other for other in active if other[dim][1] > box[dim][0]]
            for other in active:
                if overlap(box, other):
                    return f"slices {format_box(other, shape)} and {format_box(box, shape)} overlap"
            active.append(box)
    elif len(boxes) > 1:
        return f"a scalar has {len(boxes)} slices"
    held, total = sum(elements(box) for box in boxes), math.prod(shape)
    return None if held == total and boxes else f"slices hold {held} of {total} elements"
