"""The largest numbers of a vector with their places, in their own format: top-k.

k values and k places as int32: 8 bytes for each that is sent (fp32).

Source: Aji and Heafield 2017
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(numbers: Tensor, count: int) -> Tensor:
    """Places of the `count` largest magnitudes of [elements], int64; NaN is larger than any."""
    return numbers.abs().topk(count, sorted=False).indices


def pack_places(numbers: Tensor, places: Tensor) -> Tensor:
    """The numbers at some places, and the places: [count · (itemsize + 4)] uint8."""
    values = numbers[places].view(torch.uint8)
    return torch.cat([values, places.to(torch.int32).view(torch.uint8)])


def unpack_places(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values [count] in `dtype`, places [count] int64) of what `pack_places` packed."""
    count = packed.numel() // (dtype.itemsize + 4)
    values, places = packed.clone().split([count * dtype.itemsize, count * 4])
    return values.view(dtype), places.clone().view(torch.int32).long()
