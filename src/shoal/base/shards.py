"""A shard: the part of one named tensor that one rank holds, described without any tensor type.

Every room but `parallel` sees distributed tensors only like this: a global name, a global shape
and the slices (one or more boxes) that are here. Plain `ddp` holds one box that is the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""One slice: (start, stop) per dim of the global shape; () for a scalar."""


@dataclass(frozen=True)
class Shard:
    """Where local data belongs in a global tensor.

    name          the parameter's or state's own name, e.g. `blocks.0.attention.q.weight`
    global_shape  shape of the whole tensor
    dtype         torch's name without the prefix: `float32`, `bfloat16`, `int64`, …
    slices        the boxes held here, in the order in which their elements are stored
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    slices: tuple[Box, ...]

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: str) -> Shard:
        """The shard of a rank that holds all of a tensor.

        >>> Shard.whole("w", (4, 2), "float32").slices
        (((0, 4), (0, 2)),)
        """
        return Shard(name, tuple(shape), dtype, (tuple((0, n) for n in shape),))

    @property
    def elements(self) -> int:
        """How many elements are held here.

        >>> Shard("w", (8, 2), "float32", (((0, 4), (0, 2)),)).elements
        8
        """
        return sum(math.prod(stop - start for start, stop in box) for box in self.slices)
