"""Codec `int8`: integers −127 … 127 times a scale per block, one byte per number.

    scale   a block's largest magnitude / 127, at least the smallest normal number of the format
    code    nearest integer to number · (127 / largest magnitude), of two equally near the even one
    number  code · scale

With one public scale for all (`scale`), the same on every member, codes of several messages may be
added as integers before anybody decodes them: what sums of masked messages need. Numbers beyond 127
scales are cut.

The quotient 127 / largest is rounded once and then multiplied with; to divide every number by the
scale would be as exact and twice as slow. The error of a number is at most 0.50002 scales.

Source: Dettmers 2016 (8-bit approximations)
Limits: the last of float32's numbers, from 3.4028234e38 on, decode to infinity
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs.base import BLOCK, BlockScaledCodec

LARGEST_CODE = 127


class Int8Codec(BlockScaledCodec):
    """The codec `int8`: a byte per number, −127 … 127 times its block's scale.

    Args:
        scale: one public scale for all blocks; 0: each block has its own.
    """

    name = "int8"
    bits = 8

    def __init__(self, dtype: torch.dtype, block: int = BLOCK, scale: float = 0.0) -> None:
        super().__init__(dtype, block)
        self.scale = scale

    def allocate_scratch(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return scratch memory for one float per number."""
        return (torch.empty(elements, dtype=self.dtype, device=device),)

    def pack(self, numbers: Tensor, scale: Tensor, codes: Tensor, room: tuple[Tensor, ...]) -> None:
        """Encode blocks as bytes −127 … 127, and the scale of each block."""
        units = room[0][: numbers.numel()].view_as(numbers)
        if self.scale:
            scale.fill_(self.scale)
            scale.masked_fill_(~numbers.isfinite().all(1, keepdim=True), math.nan)
            torch.div(numbers, self.scale, out=units).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
            codes.view(torch.int8).copy_(units.nan_to_num_().view(-1))
            return
        least = LARGEST_CODE * torch.finfo(self.dtype).tiny
        if len(numbers) == 1 and numbers.device.type == "cpu":
            # One block: Python's numbers cost less than tensors of one element. The quotient of two
            # float32 in double precision, rounded once more, is their quotient in float32.
            low, high = (end.item() for end in torch.aminmax(numbers))
            finite = math.isfinite(low) and math.isfinite(high)
            largest = max(high, -low, least) if finite else math.nan
            scale.fill_(largest / LARGEST_CODE)
            torch.mul(numbers, LARGEST_CODE / largest, out=units).round_()
        else:
            ends = torch.maximum(numbers.amax(1, keepdim=True), -numbers.amin(1, keepdim=True))
            ends.clamp_(min=least)
            # A tensor, not a number: by a number some devices divide with a rounded reciprocal.
            most = torch.full_like(ends, LARGEST_CODE)
            torch.div(ends, most, out=scale)
            torch.mul(numbers, most.div_(ends), out=units).round_()
        codes.view(torch.int8).copy_(units.view(-1))

    def unpack(self, codes: Tensor, units: Tensor) -> None:
        """Decode signed bytes to numbers, in units of their scale."""
        units.copy_(codes.view(torch.int8))
