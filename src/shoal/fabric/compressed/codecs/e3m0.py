"""Codec `e3m0`: a sign and a power of two in four bits, and a scale per block.

The format E3M0Codec has one sign bit, three exponent bits e and no mantissa:

    code 8·s + e    e = 1 … 7   (−1)ˢ · scale · 2^(e − 7): seven magnitudes, 1/64 … 1 scale
                    e = 0       zero (8 is −0)
    scale           the power of two nearest to the block's largest magnitude, at least 2⁻¹¹⁹
                    (float64: 2⁻¹⁰¹⁵) and at most the largest that the format holds
    byte i          code of number 2i + 16 · code of number 2i + 1

A magnitude goes to the nearest of these, in the linear sense: between 2^k and 2^(k+1) the border is
1.5 · 2^k, between 0 and the smallest it is half of that, and what lies on a border goes up. Least
absolute error is what a mean of messages needs; the border of the logarithms, √2, would serve
products. Since scale and magnitudes are powers of two, a number's sign, exponent and first bit of
the mantissa decide: the code is worked out of these bits in whole numbers.
The error is at most a third of a number, or 1/128 scale.

Source: Douillard et al. 2025 (Streaming DiLoCo sends E3M0Codec; its scale and rounding are not
given) Limits: from 1.5 times the largest scale on (float32: 2.55e38) numbers decode to that scale
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs.base import BLOCK, BlockScaledCodec

LARGEST_CODE = 7
SIGN_PLACE = 8 << 6
"""Sign bit, seven places times 64 above the codes."""
LEAST_EXPONENT = 8
"""Least stored exponent of a scale: half the smallest magnitude is then a normal number."""


class E3M0Codec(BlockScaledCodec):
    """The codec `e3m0`: sign and a 3-bit exponent per number, and a scale 2^k per block."""

    name = "e3m0"
    bits = 4

    def __init__(self, dtype: torch.dtype, block: int = BLOCK) -> None:
        super().__init__(dtype, block)
        wide = dtype == torch.float64
        self.integer = torch.int64 if wide else torch.int32
        self.exponents = 2048 if wide else 256
        # What is left of a number's bits: sign, exponent, the first bit of the mantissa.
        self.shift = 51 if wide else 22

    def allocate_scratch(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return scratch memory for code and sign of each number, and for pairs of codes."""
        pairs = -(-elements // 2)
        return (
            torch.empty(2 * pairs, dtype=torch.int16, device=device),
            torch.empty(elements, dtype=torch.int16, device=device),
            torch.empty(pairs, dtype=torch.int32, device=device),
        )

    def pack(self, numbers: Tensor, scale: Tensor, codes: Tensor, room: tuple[Tensor, ...]) -> None:
        """Encode blocks as 4-bit codes and scales 2^k, one block at a time."""
        code, sign, together = room
        width = numbers.shape[1]
        ends = zip(numbers.amax(1).tolist(), numbers.amin(1).tolist(), strict=True)
        for place, (high, low) in enumerate(ends):
            exponent = self._exponent(max(high, -low))
            scale[place] = math.ldexp(1.0, exponent) if exponent is not None else math.nan
            own = code[width * place : width * (place + 1)]
            bits = numbers[place].view(self.integer)
            torch.bitwise_right_shift(bits, self.shift, out=own)
            self._codes(own, sign[:width], exponent or 0)
        count = numbers.numel()
        code[count : count + count % 2] = 0
        # As integers of two codes: one, and 16 times its neighbour, in the lowest byte.
        pairs = code[: count + count % 2].view(torch.int32)
        out = together[: len(pairs)]
        codes.copy_(torch.bitwise_right_shift(pairs, 12, out=out).bitwise_or_(pairs))

    def _codes(self, steps: Tensor, sign: Tensor, exponent: int) -> None:
        """Convert the scaled numbers into codes, in place; the scale is 2^exponent.

        Half steps of the exponent t = 0 … 14, counted from a quarter of the smallest magnitude,
        have the codes 0, 1, 1, 1, 2, 2, 3, 3 … 7: that is (31 · t + 33) >> 6. Intermediate 16-bit
        results may overflow; the code is between 0 and 15.
        """
        last = 2 * self.exponents  # the sign's bit
        torch.bitwise_and(steps, last, out=sign)
        first = 2 * (exponent - LARGEST_CODE + self.exponents // 2 - 1) - 1
        steps.bitwise_and_(last - 1).clamp_(first, first + 14)
        steps.mul_(31).add_(_to_int16(33 - 31 * first))
        if last > SIGN_PLACE:
            sign.bitwise_right_shift_((last // SIGN_PLACE).bit_length() - 1)
        steps.bitwise_or_(sign).bitwise_right_shift_(6)

    def unpack(self, codes: Tensor, units: Tensor) -> None:
        """Decode pairs of 4-bit codes by a table of all bytes, in units of their scale."""
        pairs = torch.view_as_complex(units.view(-1, 2))
        torch.index_select(_byte_pair_table(self.dtype, units.device), 0, codes.int(), out=pairs)

    def _exponent(self, largest: float) -> int | None:
        """Return the scale's exponent for a block's largest magnitude; None if not finite."""
        if not math.isfinite(largest):
            return None
        fraction, above = math.frexp(max(largest, torch.finfo(self.dtype).tiny))
        nearest = above if fraction >= 0.75 else above - 1
        bias = self.exponents // 2 - 1
        return min(max(nearest, LEAST_EXPONENT - bias), self.exponents - 2 - bias)


def _to_int16(number: int) -> int:
    """Return an integer wrapped to 16 bits, signed."""
    return (number + 2**15) % 2**16 - 2**15


@functools.cache
def _byte_pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table [256], complex: the two numbers of every byte, in units of the scale."""
    magnitudes = [0.0, *(2.0 ** (e - LARGEST_CODE) for e in range(1, 8))]
    values = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=dtype, device=device)
    code = torch.arange(256, device=device)
    return torch.complex(values[code & 15], values[code >> 4])
