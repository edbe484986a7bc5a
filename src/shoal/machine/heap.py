"""Tell the C heap which blocks it gives back to the system when they are freed."""

from __future__ import annotations

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt(3)."""

MOST_BYTES = 2**25
"""glibc maps larger blocks on their own whatever it is told, on machines of 64 bits."""

HEAP_END_BYTES = 2**26
"""Free memory that stays at the end of the heap: as much as glibc learns to keep by itself."""

_for_good = [MOST_BYTES]
"""The least that was asked for until the process ends."""


def map_blocks_from(least_bytes: int, *, for_good: bool = False) -> None:
    """Return blocks of this size and more to the system when they are freed; needs glibc.

    glibc maps large blocks on their own, but raises its limit to the largest block that was freed
    (up to 32 MiB) and keeps in its heap what is below. What fsdp frees after each block then stays:
    an MLP of 50M weights held more memory under fsdp than under ddp. With the limit fixed it no
    longer learns how much free memory to keep at the heap's end either, so that is told as well.
    Variables that the user set for glibc's allocator win.

    Args:
        least_bytes: smallest block that is mapped on its own.
        for_good: later calls may ask for less, and not for more.

    References:
        mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    if for_good:
        _for_good.append(least_bytes)
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, min(least_bytes, *_for_good))
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            libc.mallopt(M_TRIM_THRESHOLD, HEAP_END_BYTES)
