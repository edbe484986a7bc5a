"""Bubble share of a pipeline's step, and the micro-batches that reduce it to a given share.

    share of the ideal   bubble / (m·(F + B + W))            "bubble fraction" in papers
    share of the step    bubble / (m·(F + B + W) + bubble)   idle share of a device

F, B, W: seconds per micro-batch and rank; `planning/pipeline_bubble.py` has the bubble of each
schedule. Sources: GPipe (Huang et al. 2019); Megatron (Narayanan et al. 2021), §2.2.
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import canonical_schedule
from shoal.planning.pipeline_bubble import bubble_s


def bubble_of_ideal(
    schedule: str, ranks: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0,
    chunks: int = 1,
) -> float:  # fmt: skip
    """Return bubble per second of work; half of the backward counts as the weights' gradients.

    >>> round(bubble_of_ideal("1f1b", 8, 32), 4) == round(7 / 32, 4)
    True
    >>> round(bubble_of_ideal("interleaved", 8, 32, chunks=2), 4) == round(7 / 64, 4)
    True
    """
    if ranks < 1 or micro_batches < 1 or chunks < 1:
        raise PlanError(
            f"ranks = {ranks}, micro_batches = {micro_batches}, chunks = {chunks}: each at least "
            f"1; try: ranks={max(1, ranks)} micro_batches={max(1, micro_batches)} "
            f"chunks={max(1, chunks)}"
        )
    half = backward / 2
    bubble = bubble_s(schedule, ranks, micro_batches, forward, half, half, chunks)
    return bubble / (micro_batches * (forward + backward))


def bubble_of_step(
    schedule: str, ranks: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0,
    chunks: int = 1,
) -> float:  # fmt: skip
    """Return the idle share of the busiest rank's step: (p−1)/(m+p−1) for 1f1b.

    >>> bubble_of_step("1f1b", 4, 9)
    0.25
    """
    ideal = bubble_of_ideal(schedule, ranks, micro_batches, forward, backward, chunks)
    return ideal / (1 + ideal)


def least_micro_batches(schedule: str, ranks: int) -> int:
    """Return the fewest micro-batches from which the schedule's formula holds.

    >>> [least_micro_batches(name, 4) for name in ("1f1b", "interleaved", "zero-bubble", "zbv")]
    [1, 4, 4, 8]
    """
    known = canonical_schedule(schedule)
    return {"interleaved": 1, "zero-bubble": 1, "zbv": 2, "dualpipe": 2}.get(known, 0) * ranks or 1


def micro_batches_for(
    schedule: str,
    ranks: int,
    share: float,
    forward: float = 1.0,
    backward: float = 2.0,
    chunks: int = 1,
) -> int:
    """Return the fewest micro-batches with which at most `share` of the step is bubble.

    The result is at least the schedule's minimum, and a multiple of the ranks for interleaved.

    Raises:
        PlanError: a share outside 0 to 1, which no pipeline reaches.

    >>> micro_batches_for("1f1b", 4, 0.25), micro_batches_for("gpipe", 16, 0.05)
    (9, 285)
    >>> micro_batches_for("zbv", 8, 0.05)
    16
    """
    if not 0 < share < 1:
        raise PlanError(f"share = {share:g}: between 0 and 1, both out; try: share=0.05")
    unit = ranks if canonical_schedule(schedule) == "interleaved" else 1
    least = least_micro_batches(schedule, ranks) // unit

    def enough(units: int) -> bool:
        reached = bubble_of_step(schedule, ranks, units * unit, forward, backward, chunks)
        return reached <= share * (1 + 1e-12)

    if enough(least):
        return least * unit
    low, high = least, 2 * least
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high * unit
