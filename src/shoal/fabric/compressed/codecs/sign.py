"""Codec `sign`: one bit per number and the mean magnitude per block, for error feedback.

    scale   mean of the block's magnitudes, summed in float64
    bit     1 for a number below 0
    number  +scale or −scale
    byte i  numbers 8i … 8i + 7, the first in the lowest bit

Its error is as large as the number itself, so it needs error feedback (`ErrorFeedback`).

Source: Seide et al. 2014 (1-bit SGD); Bernstein et al. 2018; Karimireddy et al. 2019 (the mean
magnitude makes sign compression contract, so error feedback converges)
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs.base import BlockScaledCodec, align_up

FOLDS = ((7, 0x0003000300030003), (14, 0x0000000F0000000F), (28, 0xFF))
"""Shifts and masks that fold eight bytes of one bit each into one byte of eight bits."""
UNFOLDS = ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))
"""Shifts and masks of the reverse, from bits to bytes."""


class SignCodec(BlockScaledCodec):
    """The codec `sign`: one bit per number, and the mean magnitude of each block."""

    name = "sign"
    bits = 1

    def allocate_scratch(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return scratch memory: a magnitude and a byte per number, a multiple of eight bytes."""
        return (
            torch.empty(elements, dtype=self.dtype, device=device),
            torch.empty(align_up(elements), dtype=torch.bool, device=device),
        )

    def pack(self, numbers: Tensor, scale: Tensor, codes: Tensor, room: tuple[Tensor, ...]) -> None:
        """Encode blocks as one sign bit per number, eight a byte, and their mean magnitudes."""
        count = numbers.numel()
        magnitudes = torch.abs(numbers, out=room[0][:count].view_as(numbers))
        scale.copy_(magnitudes.sum(1, keepdim=True, dtype=torch.float64) / numbers.shape[1])
        torch.lt(numbers, 0, out=room[1][:count].view_as(numbers))
        room[1][count : align_up(count)] = False
        eights = room[1][: align_up(count)].view(torch.int64)
        for shift, kept in FOLDS:
            eights.bitwise_or_(eights >> shift).bitwise_and_(kept)
        codes.copy_(eights)

    def unpack(self, codes: Tensor, units: Tensor) -> None:
        """Decode sign bits to −1 and 1."""
        eights = codes.long()
        for shift, kept in UNFOLDS:
            eights.bitwise_or_(eights << shift).bitwise_and_(kept)
        units.copy_(eights.view(torch.uint8)).mul_(-2).add_(1)
