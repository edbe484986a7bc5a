"""Shard: the part of one named tensor that one rank holds, without any tensor type.

Every package except `parallel` sees distributed tensors only in this form: a global name, a global
shape and the local slices (one or more boxes). Plain `ddp` has one box, the whole tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.base.errors import ConfigError

Box = tuple[tuple[int, int], ...]
"""One slice: (start, stop) per dim of the global shape; () for a scalar."""

DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip
"""torch's dtype name → (safetensors' name, bytes per element): everything a checkpoint can hold."""


@dataclass(frozen=True)
class Shard:
    """The part of one named tensor that one rank holds, as boxes of the whole.

    Attributes:
        name: the parameter's or state's own name, e.g. `blocks.0.attention.q.weight`.
        global_shape: shape of the whole tensor.
        dtype: torch's name without the prefix: `float32`, `bfloat16`, `int64`, …
        slices: boxes of this rank, in stored order; a box is (start, stop) per dim, () for a
            scalar.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    slices: tuple[Box, ...]

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: str) -> Shard:
        """Return the shard of a rank that holds all of a tensor.

        >>> Shard.whole("w", (4, 2), "float32").slices
        (((0, 4), (0, 2)),)
        """
        return Shard(name, tuple(shape), dtype, (tuple((0, n) for n in shape),))

    @property
    def elements(self) -> int:
        """Number of elements that this rank holds.

        >>> Shard("w", (8, 2), "float32", (((0, 4), (0, 2)),)).elements
        8
        """
        return sum(math.prod(stop - start for start, stop in box) for box in self.slices)

    def part(self, start: int, stop: int) -> tuple[Box, ...]:
        """Return the boxes of this shard's elements start … stop − 1, in stored order.

        >>> rows = Shard("w", (8, 2), "float32", (((0, 2), (0, 2)), ((4, 6), (0, 2))))
        >>> rows.part(2, 6)
        (((1, 2), (0, 2)), ((4, 5), (0, 2)))
        """
        found: list[Box] = []
        place = 0
        for box in self.slices:
            sizes = [high - low for low, high in box]
            size = math.prod(sizes)
            inner = flat_slices(sizes, max(start - place, 0), min(stop - place, size))
            for piece in inner:
                moved = zip(box, piece, strict=True)
                found.append(tuple((low + a, low + b) for (low, _), (a, b) in moved))
            place += size
        return tuple(found)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a torch dtype, by its name without `torch.`.

    >>> [dtype_bytes(name) for name in ("float32", "bfloat16", "int64", "float8_e4m3fn", "bool")]
    [4, 2, 8, 1, 1]
    """
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) // 8 if bits else 1


def flat_slices(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes of elements start … stop − 1 of a tensor, elements counted row by row.

    >>> flat_slices((4, 3), 2, 10)
    (((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 1)))
    """
    if start >= stop:
        return ()
    if not shape:
        return ((),)
    rest = tuple((0, n) for n in shape[1:])
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    found: list[Box] = []
    if start % row:
        end = min(stop, first * row) - (first - 1) * row
        inner = flat_slices(shape[1:], start % row, end)
        found += [((first - 1, first), *box) for box in inner]
    if first < last:
        found.append(((first, last), *rest))
    if stop % row and last >= first:
        found += [((last, last + 1), *box) for box in flat_slices(shape[1:], 0, stop % row)]
    return tuple(found)


def check_savable(dtypes: Mapping[str, str], where: str) -> None:
    """Refuse tensors of a dtype that no checkpoint can store.

    Args:
        dtypes: tensor's name → torch's name of its dtype, without "torch.".
        where: start of the message.

    Raises:
        ConfigError: a dtype is unsupported; with the first such tensor's name.
    """
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(
                f"{where}: {name} is {dtype}, which checkpoints cannot hold; they hold "
                f"{', '.join(DTYPES)}"
            )


@dataclass(frozen=True)
class StepDivisibility:
    """Divisions of an optimizer step that are exact: "" for yes, or a line with the reason for no.

    Attributes:
        flat: a rank updates a 1-D piece of a parameter.
        rows: a rank updates some rows of a parameter.
        apart: a rank updates some parameters whole, without the others.
    """

    flat: str
    rows: str
    apart: str
