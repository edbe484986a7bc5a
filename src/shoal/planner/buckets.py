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

from collections.abc import Sequence
from dataclasses import replace

from shoal.base.facts import ParameterFacts
from shoal.base.plan import Bucket

BUCKET_BYTES = 25 * 2**20


def plan_buckets(
    parameters: Sequence[ParameterFacts], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Cut the trainable parameters into buckets of at most `bucket_bytes`, or of one parameter.

    Takes   parameters in the order of the module (tied ones once)
    Gives   buckets in the order in which they are sent

    >>> facts = [ParameterFacts(n, (4,), "float32", 4) for n in "abc"]
    >>> [b.names for b in plan_buckets(facts, bucket_bytes=32)]
    [('c', 'b'), ('a',)]
    """
    buckets: list[Bucket] = []
    open_names: dict[tuple[str, str, str], list[ParameterFacts]] = {}

    def close(kind: tuple[str, str, str]) -> None:
        held = open_names.pop(kind)
        total = sum(p.elements for p in held)
        names = tuple(p.name for p in held)
        buckets.append(Bucket(names, total, kind[0], held[0].element_bytes, compute=kind[1]))

    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.compute, parameter.held
        held = open_names.get(kind, [])
        size_bytes = sum(p.elements for p in held) * parameter.element_bytes
        if held and size_bytes + parameter.elements * parameter.element_bytes > bucket_bytes:
            close(kind)
        open_names.setdefault(kind, []).append(parameter)
    for kind in list(open_names):
        close(kind)
    return tuple(buckets)


def cut_buckets(
    buckets: Sequence[Bucket],
    parameters: Sequence[ParameterFacts],
    ranks: int,
    *,
    whole_parameters: bool = False,
) -> tuple[Bucket, ...]:
    """Give every bucket the cuts between the shares of its owners.

    whole_parameters   no parameter is cut; ranks then own unequal shares

    >>> facts = [ParameterFacts(n, (s,), "float32", 4) for n, s in (("a", 5), ("b", 2))]
    >>> [(b.elements, b.cuts) for b in cut_buckets(plan_buckets(facts), facts, 2)]
    [(8, (0, 4, 8))]
    >>> [b.cuts for b in cut_buckets(plan_buckets(facts), facts, 2, whole_parameters=True)]
    [(0, 2, 7)]
    """
    sizes = {p.name: p.elements for p in parameters}
    if not whole_parameters:
        padded = [-(-b.elements // ranks) * ranks for b in buckets]
        return tuple(
            replace(b, elements=n, cuts=tuple(n // ranks * rank for rank in range(ranks + 1)))
            for b, n in zip(buckets, padded, strict=True)
        )
    loads = [0] * ranks
    cut = []
    for bucket in buckets:
        ends = _owners_ends([sizes[name] for name in bucket.names], loads)
        cut.append(replace(bucket, cuts=(0, *ends)))
        loads = [
            load + end - start for load, start, end in zip(loads, cut[-1].cuts, ends, strict=False)
        ]
    return tuple(cut)


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
