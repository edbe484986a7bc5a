"""Memory of a device's caching allocator, and how much of it is fragmented.

Source: torch.cuda.memory_snapshot: segments, each a list of blocks that are active or inactive
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.base.text.units import bytes_text


@dataclass(frozen=True)
class AllocatorPool:
    """Memory reserved by a device's caching allocator, and its largest free block.

    Attributes:
        allocated_bytes: of tensors.
        reserved_bytes: peak of the memory taken from the device.
        free_bytes: reserved and not allocated, now.
        hole_bytes: the largest free block.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    hole_bytes: int


FRAGMENTED = 0.1
"""Share of the reserved memory in small free blocks from which `describe_pool` suggests SETTING."""

SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""One segment that grows, instead of many that each fit one tensor: no remainders at their ends. It
does not merge holes between live tensors (torch: ExpandableSegment)."""


def has_expandable_segments(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether SETTING is already in effect, under either of the names that torch reads."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:True" in environ.get(name, "") for name in names)


def read_device_pool(device: torch.device) -> AllocatorPool | None:
    """Return the state of a CUDA device's caching allocator; None for other devices.

    The snapshot visits all blocks and takes milliseconds: call it at a run's end, not in a step.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    mine = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return pool_from_snapshot(mine, torch.cuda.max_memory_reserved(device))


def pool_from_snapshot(segments: Iterable[Mapping[str, Any]], reserved_bytes: int) -> AllocatorPool:
    """Return the allocator's state from a `torch.cuda.memory_snapshot` of one device.

    >>> held, free = "active_allocated", "inactive"
    >>> told = ((6, held), (1, free), (2, held), (3, free))
    >>> blocks = [{"size": size, "state": state} for size, state in told]
    >>> pool_from_snapshot([{"blocks": blocks}], 12)
    AllocatorPool(allocated_bytes=8, reserved_bytes=12, free_bytes=4, hole_bytes=3)
    """
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [int(block["size"]) for block in blocks if block["state"] == "inactive"]
    used = sum(int(block["size"]) for block in blocks if block["state"] != "inactive")
    return AllocatorPool(used, reserved_bytes, sum(free), max(free, default=0))


def describe_pool(pool: AllocatorPool) -> str:
    """Describe the allocator's memory; name the setting that helps if it is fragmented.

    >>> gib = 2**30
    >>> describe_pool(AllocatorPool(9 * gib, 10 * gib, gib, gib))
    '10.0 GiB reserved, 9.0 GiB allocated, largest hole 1.0 GiB'
    >>> describe_pool(AllocatorPool(6 * gib, 10 * gib, 4 * gib, gib)).partition("; ")[2]
    '4.0 GiB free in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes fewer'
    """
    told = (
        f"{bytes_text(pool.reserved_bytes)} reserved, {bytes_text(pool.allocated_bytes)} "
        f"allocated, largest hole {bytes_text(pool.hole_bytes)}"
    )
    scattered = pool.free_bytes - pool.hole_bytes
    if scattered < FRAGMENTED * pool.reserved_bytes:
        return told
    mend = "" if has_expandable_segments() else f": {SETTING} makes fewer"
    return f"{told}; {bytes_text(pool.free_bytes)} free in pieces{mend}"
