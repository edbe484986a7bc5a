"""A number as a sign and a power of two: four bits, and a scale per block.

The format E3M0 has one sign bit, three exponent bits e and no mantissa:

    code 8·s + e    e = 1 … 7   (−1)ˢ · scale · 2^(e − 7): seven magnitudes, 1/64 … 1 scale
                    e = 0       zero (8 is −0)
    scale           the power of two nearest to the block's largest magnitude, at least 2⁻¹¹⁹
                    (float64: 2⁻¹⁰¹⁵) and at most the largest that the format holds
    byte i          code of number 2i + 16 · code of number 2i + 1

A magnitude goes to the nearest of these, in the linear sense: between 2^k and 2^(k+1) the border is
1.5 · 2^k, between 0 and the smallest it is half of that, and what lies on a border goes up. Least
absolute error is what a mean of messages needs; the border of the logarithms, √2, would serve
products. Since scale and magnitudes are powers of two, a number's sign, exponent and first bit of
the mantissa decide: they are an index into a table of codes, and no number is ever computed with.
The error is at most a third of a number, or 1/128 scale.

Source: Douillard et al. 2025 (Streaming DiLoCo sends E3M0; its scale and rounding are not given)
Limits: from 1.5 times the largest scale on (float32: 2.55e38) numbers decode to that scale
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shoal.fabric.codecs.base import BLOCK, ScaledBlocks

LARGEST_CODE = 7
LEAST_EXPONENT = 8
"""Of a scale, as the format stores it: then half the smallest magnitude is a normal number."""


class E3M0(ScaledBlocks):
    """The codec `e3m0`."""

    name = "e3m0"
    bits = 4

    def __init__(self, dtype: torch.dtype, block: int = BLOCK) -> None:
        super().__init__(dtype, block)
        wide = dtype == torch.float64
        self.integer = torch.int64 if wide else torch.int32
        self.exponents = 2048 if wide else 256
        # What is left of a number's bits: sign, exponent, the first bit of the mantissa.
        self.shift = 51 if wide else 22

    def room(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Index and code of each number, and codes that come together, of a multiple of four."""
        fours = -(-elements // 4)
        return (
            torch.empty(elements, dtype=self.integer, device=device),
            torch.empty(4 * fours, dtype=torch.uint8, device=device),
            torch.empty(fours, dtype=torch.int32, device=device),
        )

    def pack(self, numbers: Tensor, scale: Tensor, codes: Tensor, room: tuple[Tensor, ...]) -> None:
        """See `ScaledBlocks.pack`; on a CPU it is one block at a time."""
        index, code, together = room
        width = numbers.shape[1]
        index = index[:width]
        ends = zip(numbers.amax(1).tolist(), numbers.amin(1).tolist(), strict=True)
        for place, (high, low) in enumerate(ends):
            exponent = self._exponent(max(high, -low))
            scale[place] = math.ldexp(1.0, exponent) if exponent is not None else math.nan
            table = self._codes(exponent or 0, codes.device)
            bits = numbers[place].view(self.integer)
            torch.bitwise_right_shift(bits, self.shift, out=index)
            index.bitwise_and_(4 * self.exponents - 1)
            torch.index_select(table, 0, index, out=code[width * place : width * (place + 1)])
        count = numbers.numel()
        code[count : -(-count // 4) * 4] = 0
        # As integers of four codes: a code, and 16 times its neighbour, in the lower byte of two.
        fours = code.view(torch.int32)
        torch.bitwise_right_shift(fours, 4, out=together).bitwise_or_(fours)
        codes.copy_(together.view(torch.int16)[: len(codes)])

    def unpack(self, codes: Tensor, units: Tensor) -> None:
        """See `ScaledBlocks.unpack`."""
        pairs = torch.view_as_complex(units.view(-1, 2))
        torch.index_select(_pairs(self.dtype, units.device), 0, codes.int(), out=pairs)

    def _exponent(self, largest: float) -> int | None:
        """Of the scale of a block with this largest magnitude; None if that is not finite."""
        if not math.isfinite(largest):
            return None
        fraction, above = math.frexp(max(largest, torch.finfo(self.dtype).tiny))
        nearest = above if fraction >= 0.75 else above - 1
        bias = self.exponents // 2 - 1
        return min(max(nearest, LEAST_EXPONENT - bias), self.exponents - 2 - bias)

    def _codes(self, exponent: int, device: torch.device) -> Tensor:
        """[4 · exponents] uint8: the code of every index, where the scale is 2^exponent."""
        count = 2 * self.exponents
        half_the_smallest = 2 * (exponent - LARGEST_CODE + self.exponents // 2 - 1)
        return _ladder(count, device)[:, count - half_the_smallest :][:, :count].flatten()


@functools.cache
def _ladder(count: int, device: torch.device) -> Tensor:
    """[2, 2 · count] uint8: codes of positive and negative numbers, in half steps of the exponent.

    From `count` on they are those of numbers from half the smallest magnitude on.
    """
    steps = torch.arange(2 * count, device=device) - count
    codes = ((steps + 1) >> 1).clamp(1, LARGEST_CODE) * (steps >= 0)
    return torch.stack([codes, codes + 8]).to(torch.uint8)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] complex: the two numbers of every byte, in units of the scale."""
    magnitudes = [0.0, *(2.0 ** (e - LARGEST_CODE) for e in range(1, 8))]
    values = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=dtype, device=device)
    code = torch.arange(256, device=device)
    return torch.complex(values[code & 15], values[code >> 4])
