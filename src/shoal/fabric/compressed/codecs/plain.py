"""Codec `none`: numbers in their own dtype or a narrower one, one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs.base import RUN, align_up, iter_block_runs, longest_run


class UncompressedCodec:
    """The codec `none`: numbers in their own dtype, without loss.

    Attributes:
        wire: the dtype in which numbers travel.
    """

    name = "none"
    gathers = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wire = dtype

    def size_bytes(self, elements: int) -> int:
        """Return the bytes of so many numbers in the dtype that is sent, with padding."""
        return align_up(elements * self.wire.itemsize)

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        """Cast a vector to the dtype that is sent."""
        end = numbers.numel() * self.wire.itemsize
        out[:end].view(self.wire).copy_(numbers)
        out[end:] = 0

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Write weight · received numbers to `out`, or add them."""
        elements = out.numel()
        coded = packed[: elements * self.wire.itemsize].view(self.wire)
        room = out.new_empty(longest_run(elements, out.device) if add else 0)
        for start, stop, _ in iter_block_runs(elements, RUN, out.device):
            numbers = room[: stop - start] if add else out[start:stop]
            numbers.copy_(coded[start:stop])
            # Not `add_(numbers, alpha=weight)`: it rounds once or twice, as the processor has it.
            if weight != 1:
                numbers.mul_(weight)
            if add:
                out[start:stop].add_(numbers)
