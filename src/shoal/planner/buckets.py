"""Which gradients travel together: fixed buckets, a part of the plan.

Gradients become ready roughly in reverse order of the parameters, so buckets are filled from the
last parameter to the first and sent in that order while the backward pass goes on. One dtype per
bucket. The buckets never change during a run: torch's DDP rebuilds its own after step 1, and since
a sum's rounding depends on an element's place in the buffer, a resume then differs in bits.
Source: Li et al. 2020 (PyTorch Distributed), §3.2; measured in docs/lab-log.md.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    open_names: dict[str, list[ParameterFacts]] = {}

    def close(dtype: str) -> None:
        held = open_names.pop(dtype)
        total = sum(p.elements for p in held)
        buckets.append(Bucket(tuple(p.name for p in held), total, dtype, held[0].element_bytes))

    for parameter in reversed(parameters):
        held = open_names.get(parameter.dtype, [])
        size_bytes = sum(p.elements for p in held) * parameter.element_bytes
        if held and size_bytes + parameter.elements * parameter.element_bytes > bucket_bytes:
            close(parameter.dtype)
        open_names.setdefault(parameter.dtype, []).append(parameter)
    for dtype in list(open_names):
        close(dtype)
    return tuple(buckets)
