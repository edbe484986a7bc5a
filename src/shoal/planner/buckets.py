"""Which gradients travel together: fixed buckets, a part of the plan.

Gradients become ready roughly in reverse order of the parameters, so buckets are filled from the
last parameter to the first and sent in that order while the backward pass goes on. One dtype per
bucket, and one format of the copies that forward passes read. The buckets never change during a
run: torch's DDP rebuilds its own after step 1, and since a sum's rounding depends on an element's
place in the buffer, a resume then differs in bits.
Under zero1 and zero2 each bucket is also cut: rank r owns the elements from cut r to cut r + 1: it
receives their sum and holds their optimizer state. Cuts are even (the bucket is padded to a
multiple of the ranks) where the optimizer's step on slices is the slices of its step; else they
fall between parameters, each of which then has one owner.
Source: Li et al. 2020 (PyTorch Distributed), §3.2; measured in docs/lab-log.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shoal.base.layout import Layout
from shoal.base.placement import Placement
from shoal.base.plan import Bucket

BUCKET_BYTES = 25 * 2**20


def plan_buckets(
    rows: Iterable[Placement], layout: Layout, rank: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Group a rank's trainable parameters into gradient buckets of at most `bucket_bytes`.

    They are filled from the last row to the first; a larger parameter has a bucket of its own.

    rows    placements in the order of the module (tied ones once), of which those of the rank's
            pipeline stage are taken
    Gives   buckets in the order in which they are sent, without cuts; all parameters of one have
            the same dtype and `compute` format, and are summed over the same ranks

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

    for row in reversed(list(_held(rows, at["pp"]))):
        kind = row.dtype, row.compute, row.travels_with(layout)
        size = math.prod(row.local_shape(at))
        held = open_rows.get(kind, [])
        elements = sum(held_size for _, held_size in held) + size
        if held and elements * row.element_bytes > bucket_bytes:
            close(kind)
        open_rows.setdefault(kind, []).append((row, size))
    for kind in list(open_rows):
        close(kind)
    return tuple(buckets)


def _held(rows: Iterable[Placement], stage: int) -> Iterator[Placement]:
    """Trainable parameters of one stage."""
    return (row for row in rows if row.trains and stage in row.stages)


def cut_buckets(
    buckets: Sequence[Bucket],
    rows: Iterable[Placement],
    layout: Layout,
    rank: int = 0,
    *,
    whole_parameters: bool = False,
) -> tuple[Bucket, ...]:
    """Cut every bucket into one share per data-parallel rank that sums it (zero 1 and 2).

    buckets   of `rank`, as `plan_buckets` gave them · rows  placements of all their parameters
    Gives     new buckets with `cuts`, where shares begin and end, in elements. Shares are equal,
              and `elements` is padded to a multiple of their number
    whole_parameters   cut between parameters only: nothing is padded, shares are unequal, but as
                       even as can be over all buckets together

    >>> rows = [Placement(n, (s,), "float32", trains=True) for n, s in (("a", 5), ("b", 2))]
    >>> layout = Layout(dp_shard=2, zero=1)
    >>> plain = plan_buckets(rows, layout)
    >>> [(b.elements, b.cuts) for b in cut_buckets(plain, rows, layout)]
    [(8, (0, 4, 8))]
    >>> [b.cuts for b in cut_buckets(plain, rows, layout, whole_parameters=True)]
    [(0, 2, 7)]
    """
    known, at = {row.name: row for row in rows}, layout.at(rank)
    loads: dict[bool, list[int]] = {}
    found = []
    for bucket in buckets:
        first = known[bucket.names[0]]
        owners = math.prod(first.degree(axis, layout) for axis in first.data_axes)
        if not whole_parameters:
            each = -(-bucket.elements // owners)
            cuts = tuple(each * owner for owner in range(owners + 1))
            found.append(replace(bucket, elements=each * owners, cuts=cuts))
            continue
        held = loads.setdefault(first.is_expert, [0] * owners)
        sizes = [math.prod(known[name].local_shape(at)) for name in bucket.names]
        cuts = (0, *_owners_ends(sizes, held))
        held[:] = [load + b - a for load, (a, b) in zip(held, pairwise(cuts), strict=True)]
        found.append(replace(bucket, cuts=cuts))
    return tuple(found)


def _owners_ends(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Where each rank's run of whole parameters ends, such that total loads come out even.

    A rank takes the next parameter while that brings it nearer to its part of all elements so far.
    """
    ranks = len(loads)
    fair = (sum(loads) + sum(sizes)) / ranks
    ends, place, taken = [], 0, 0
    for rank in range(ranks):
        load = loads[rank]
        while taken < len(sizes):
            size = sizes[taken]
            last = rank == ranks - 1
            if not last and abs(load + size - fair) > abs(load - fair):
                break
            load, place, taken = load + size, place + size, taken + 1
        ends.append(place)
    return ends
