"""What offload moves, and how much of it is on the device at once: the sizes that a run uses too.

Source: shoal.parallel.offload, which asks here how large a piece of the optimizer's step is
"""

from __future__ import annotations

PIECE_BYTES = 64 * 2**20
"""Of parameters that are stepped together, where there is room for it."""

PIECES = 3
"""Of them on the device at once: one comes, one is stepped, one leaves."""

PIECES_OF_MEMORY = 64
"""A device has room for so many pieces' parameters at least."""


def piece_bytes(memory_bytes: float) -> int:
    """Choose how many bytes of parameters are stepped together on a device of so much memory.

    >>> piece_bytes(24 * 2**30) // 2**20, piece_bytes(2**28) // 2**20
    (64, 4)
    """
    return int(min(PIECE_BYTES, memory_bytes / PIECES_OF_MEMORY))
