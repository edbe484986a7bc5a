"""Cut each gradient bucket into one share per rank, for ZeRO stages 1 and 2.

Rank r owns the elements from cut r to cut r + 1: it receives their sum and holds their optimizer
state. Cuts are even if the optimizer can step slices of a parameter by themselves; the bucket is
then padded to a multiple of the ranks. Else cuts fall between parameters, and one rank owns each
parameter. Under a parameter server only the last ranks own elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Bucket


def cut_buckets(
    buckets: Sequence[Bucket],
    rows: Iterable[Placement],
    layout: Layout,
    rank: int = 0,
    *,
    whole_parameters: bool = False,
) -> tuple[Bucket, ...]:
    """Cut every bucket into one share per data-parallel rank that sums it (zero 1 and 2).

    Args:
        buckets: of `rank`, from `plan_buckets`.
        rows: placements of all their parameters.
        whole_parameters: cut between parameters only. Nothing is padded; shares are unequal, but as
            even as possible over all buckets together.

    Returns:
        New buckets with `cuts`: the first and last element of each share. Unless
        `whole_parameters`, shares are equal, and `elements` is padded to a multiple of their
        number.

    >>> from shoal.planning.gradient_buckets import plan_buckets
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
        idle, owners = (owners - layout.servers, layout.servers) if layout.servers else (0, owners)
        if not whole_parameters:
            each = -(-bucket.elements // owners)
            cuts = (*[0] * idle, *(each * owner for owner in range(owners + 1)))
            found.append(replace(bucket, elements=each * owners, cuts=cuts))
            continue
        held = loads.setdefault(first.is_expert, [0] * owners)
        sizes = [math.prod(known[name].local_shape(at)) for name in bucket.names]
        cuts = (0, *_shard_ends(sizes, held))
        held[:] = [load + b - a for load, (a, b) in zip(held, pairwise(cuts), strict=True)]
        cuts = (*[0] * idle, *cuts)
        found.append(replace(bucket, cuts=cuts))
    return tuple(found)


def _shard_ends(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the element at which each rank's run of whole parameters ends, for even total loads.

    A rank takes the next parameter if that brings its load nearer to the mean load of all ranks.
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
