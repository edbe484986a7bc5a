"""Arithmetic on boxes: which part of a tensor a slice is, and where two slices meet.

A box is one (start, stop) per dim of the global tensor. Resharding is nothing but overlaps: a
wanted box is filled from every stored box that it meets. That works only if the stored boxes tile
the tensor, which is what `untiled` checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.base.shards import Box


def elements(box: Box) -> int:
    """How many elements a box holds; a scalar's box () holds one.

    >>> elements(((0, 4), (2, 5))), elements(())
    (12, 1)
    """
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of this shape."""
    return tuple((0, n) for n in shape)


def text(box: Box, shape: Sequence[int]) -> str:
    """A box as Python slices, a full dim as `:`; empty for a scalar.

    >>> text(((0, 512), (0, 8)), (1024, 8))
    '[0:512, :]'
    """
    parts = [
        ":" if (start, stop) == (0, n) else f"{start}:{stop}"
        for (start, stop), n in zip(box, shape, strict=True)
    ]
    return f"[{', '.join(parts)}]" if parts else ""


def label(name: str, box: Box, shape: Sequence[int]) -> str:
    """A tensor's name with its slice, as messages show it."""
    return f"{name} {text(box, shape)}".rstrip()


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share, or None.

    >>> overlap(((0, 4), (0, 2)), ((3, 9), (1, 2)))
    ((3, 4), (1, 2))
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of `box` within an array that holds `outer`.

    >>> inside(((3, 4),), ((2, 6),))
    (slice(1, 2, None),)
    """
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies within a tensor of this shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
    )


def untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why these boxes are not a tiling (every element exactly once), or None if they are.

    Sweeps along the dim with most cuts, so n boxes cut along one dim cost n log n.

    >>> untiled((4,), [((0, 2),), ((2, 4),)]) is None
    True
    >>> untiled((4,), [((0, 2),), ((1, 4),)])
    'slices [0:2] and [1:4] overlap'
    >>> untiled((4, 2), [((0, 3), (0, 2))])
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
                    return f"slices {text(other, shape)} and {text(box, shape)} overlap"
            active.append(box)
    elif len(boxes) > 1:
        return f"a scalar has {len(boxes)} slices"
    held, total = sum(elements(box) for box in boxes), math.prod(shape)
    return None if held == total and boxes else f"slices hold {held} of {total} elements"
