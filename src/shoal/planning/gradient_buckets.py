"""Gradient buckets: the groups of gradients that one collective sums, fixed by the plan.

Gradients become ready roughly in reverse order of the parameters. Buckets are therefore filled from
the last parameter to the first, and sent in that order during the backward pass. All parameters of
a bucket have one dtype and one compute format. The buckets never change during a run. torch's DDP
rebuilds its own after step 1; since a sum's rounding depends on an element's position in the
buffer, a resumed DDP run then differs in bits.
Under zero1 and zero2 each bucket is also cut into shares (`bucket_shards.py`).
Source: Li et al. 2020 (PyTorch Distributed), §3.2; measured in docs/lab-log.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Bucket

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20


def plan_buckets(
    rows: Iterable[Placement], layout: Layout, rank: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Group a rank's trainable parameters into gradient buckets of at most `bucket_bytes`.

    Buckets are filled from the last row to the first; a larger parameter gets its own bucket.

    Args:
        rows: placements in the order of the module (tied ones once); those of the rank's pipeline
            stage are used.

    Returns:
        Buckets in the order in which they are sent, without cuts. All parameters of a bucket have
        the same dtype and `compute` format, and the same ranks sum them.

    >>> rows = [Placement(name, (4,), "float32", trains=True) for name in "abc"]
    >>> [b.names for b in plan_buckets(rows, Layout(), bucket_bytes=32)]
    [('c', 'b'), ('a',)]
    """
    at = layout.at(rank)
    buckets: list[Bucket] = []
    open_rows: dict[tuple[Any, ...], list[tuple[Placement, int]]] = {}

    def close(kind: tuple[Any, ...]) -> None:
        held = open_rows.pop(kind)
        first, total = held[0][0], sum(size for _, size in held)
        names = tuple(row.name for row, _ in held)
        buckets.append(
            Bucket(names, total, first.dtype, first.element_bytes, compute=first.compute)
        )

    for row in reversed([row for row in rows if row.trains and at["pp"] in row.stages]):
        kind = row.dtype, row.compute, row.bucket_key(layout)
        size = math.prod(row.local_shape(at))
        held = open_rows.get(kind, [])
        elements = sum(held_size for _, held_size in held) + size
        if held and elements * row.element_bytes > bucket_bytes:
            close(kind)
        open_rows.setdefault(kind, []).append((row, size))
    for kind in list(open_rows):
        close(kind)
    return tuple(buckets)


def pack_messages(
    items: Sequence[T], sizes_bytes: Sequence[int], most_bytes: int
) -> Iterator[list[T]]:
    """Yield items that share a message, in order: at most `most_bytes`, or one item."""
    message: list[T] = []
    held_bytes = 0
    for item, size_bytes in zip(items, sizes_bytes, strict=True):
        if message and held_bytes + size_bytes > most_bytes:
            yield message
            message, held_bytes = [], 0
        message.append(item)
        held_bytes += size_bytes
    if message:
        yield message
