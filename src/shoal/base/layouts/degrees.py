"""Checks of a layout's degrees: their product, the supported axes, their combinations.

A layout given by its degrees is used exactly, without additions. An impossible layout raises an
error with the nearest possible one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import AXES, Layout
from shoal.base.layouts.schedule_names import SPLIT_BACKWARD, resolve_schedule

BUILT_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that this version splits."""


def check_degrees(
    degrees: Mapping[str, int],
    processes: int,
    zero: int | None = None,
    *,
    threads: int = 0,
    schedule: str = "",
    chunks: int = 0,
) -> Layout:
    """Create the layout with exactly these degrees, if they can be combined; others are 1.

    Args:
        degrees: degrees by axis, and `ep`; their product without ep must be the number of
            processes.
        zero: ZeRO stage of `dp_shard`: 1, 2, 3; None: 3 if dp_shard is above 1, else 0.
        threads: replicas in threads, which no degree allows: any but 0 is refused.
        schedule, chunks: pipeline schedule and stages per rank; "", 0: 1f1b, and the schedule's
            default number.

    Raises:
        PlanError: unknown axis, degree below 1, islands above 1 (separate runs), wrong product,
            zero or schedule that the degrees do not allow, zero 3 with a schedule that splits the
            backward, or ep that does not divide the data-parallel ranks in whole shards; with the
            nearest legal choice.

    >>> check_degrees({"dp_replicate": 2}, 2).strategy, check_degrees({"dp_shard": 2}, 2).strategy
    ('ddp', 'fsdp')
    >>> check_degrees({"pp": 2, "dp_shard": 2}, 4, zero=1).text()
    'zero1 + pp (pp = 2, dp_shard = 2, schedule = 1f1b)'
    """
    for axis, degree in degrees.items():
        if axis not in (*AXES, "ep"):
            from shoal.base.layouts.strategies import unknown_key_text

            raise PlanError(unknown_key_text(axis, degree))
        if degree < 1:
            raise PlanError(f"layout.{axis} = {degree}: at least 1; try: layout.{axis}=1")
        if degree > 1 and axis not in (*BUILT_AXES, "ep"):
            raise PlanError(
                f"layout.{axis} = {degree}: islands are runs of their own, each with a layout; "
                f"try: islands.method=diloco islands.count={degree}"
            )
    layout = Layout.of(degrees)
    if layout.processes != processes:
        raise PlanError(_product_text(degrees, processes))
    if threads:
        raise PlanError(
            f"layout.threads = {threads}: replicas in threads are one process, the degrees given "
            f"with them are {layout.text()}; try: layout.strategy=dp without degrees, or leave "
            f"layout.threads out"
        )
    layout = replace(layout, zero=resolve_zero_stage(layout, zero))
    schedule, chunks = resolve_schedule(schedule, chunks, layout.pp)
    layout = replace(layout, schedule=schedule, chunks=chunks)
    check_combination(layout)
    return layout


def check_combination(layout: Layout) -> None:
    """Refuse combinations of layout parts that are wrong or not supported.

    Raises:
        PlanError: a combination is refused; with the reason and the nearest legal layout.
    """
    _check_experts(layout)
    if layout.zero == 3 and layout.schedule in SPLIT_BACKWARD:
        # Measured on torch 2.13: gradients of 0.55 to 1.3 times the true norm, without an error.
        lighter = ", or layout.zero=2" if layout.dp_replicate == 1 else ""
        raise PlanError(
            f"layout.schedule = {layout.schedule}: runs a backward in two halves, and "
            f"{layout.data_strategy} frees the gathered parameters between them; try: "
            f"layout.schedule=1f1b{lighter}"
        )


def _check_experts(layout: Layout) -> None:
    """Raise PlanError if the data-parallel ranks cannot hold `ep` expert groups."""
    if layout.can_share_experts(layout.ep):
        return
    lent = filter(layout.can_share_experts, range(1, layout.data_degree + 1))
    nearest = min(lent, key=lambda n: (abs(n - layout.ep), n))
    more = f"layout.dp_replicate={layout.ep}, or " if layout.data_degree == 1 else ""
    raise PlanError(
        f"layout.ep = {layout.ep}: deals experts to data-parallel ranks, of which there are "
        f"dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard}, whole shards or whole "
        f"groups of them; try: {more}layout.ep={nearest}"
    )


def _product_text(degrees: Mapping[str, int], processes: int) -> str:
    """Format the error for degrees whose product is not the number of processes."""
    counted = {axis: degree for axis, degree in degrees.items() if axis != "ep"}
    named = " × ".join(f"{axis} {degree}" for axis, degree in counted.items()) or "no axis"
    aside = " (ep multiplies nothing)" if "ep" in degrees else ""
    product = math.prod(counted.values())
    changes = " ".join(f"layout.{axis}={n}" for axis, n in _nearest(degrees, processes).items())
    return (
        f"layout: {named} = {product} processes{aside}, but launch.processes = {processes}; "
        f"try: {changes}, or launch.processes={product}"
    )


def _nearest(degrees: Mapping[str, int], processes: int) -> dict[str, int]:
    """Return changes that make the degrees multiply out; tp, cp and pp change least.

    >>> _nearest({"tp": 2}, 8), _nearest({"tp": 3}, 4)
    ({'dp_replicate': 4}, {'tp': 2, 'dp_replicate': 2})
    >>> _nearest({"pp": 4, "tp": 4}, 8), _nearest({"dp_replicate": 2, "dp_shard": 2}, 6)
    ({'pp': 2}, {'dp_replicate': 3})
    """
    wanted = {}
    left = processes
    for axis in ("tp", "cp", "pp"):
        wanted[axis] = _divisor(left, degrees.get(axis, 1))
        left //= wanted[axis]
    shard = degrees.get("dp_shard", 1)
    wanted["dp_shard"] = shard if left % shard == 0 else left
    wanted["dp_replicate"] = left // wanted["dp_shard"]
    return {axis: n for axis, n in wanted.items() if n != degrees.get(axis, 1)}


def _divisor(number: int, near: int) -> int:
    """Return the divisor of `number` nearest to `near`; the smaller of two equally near ones.

    >>> _divisor(8, 3), _divisor(8, 7)
    (2, 8)
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - near), d))


def layout_for_planning(degrees: dict[str, int], processes: int, zero: int | None = None) -> Layout:
    """Create a layout to plan, not to run; `dp_replicate` defaults to the remaining ranks.

    Args:
        degrees: degrees by axis of `Layout`, islands too (another word is a TypeError); others are
            1.
        zero: ZeRO stage of `dp_shard`: 1, 2, 3; None: 3 if dp_shard is above 1, else 0.

    Raises:
        PlanError: a degree is below 1, the product is not `processes`, or the degrees do not allow
            `zero`. Combinations are not checked (`check_degrees`).

    >>> layout_for_planning({"tp": 8, "pp": 4}, 128).dp_replicate
    4
    """
    for axis, degree in degrees.items():
        if degree < 1:
            raise PlanError(f"layout.{axis} = {degree}: at least 1; try: layout.{axis}=1")
    layout = Layout.of(degrees)
    if "dp_replicate" not in degrees and processes % layout.processes == 0:
        layout = replace(layout, dp_replicate=processes // layout.processes)
    if layout.processes != processes:
        named = " × ".join(f"{k} {v}" for k, v in degrees.items() if k != "ep")
        changes = _nearest(degrees, processes)
        if "dp_replicate" not in degrees:
            changes.pop("dp_replicate", None)  # follows from the others
        nearest = " ".join(f"layout.{axis}={n}" for axis, n in changes.items())
        raise PlanError(
            f"layout: {named} = {layout.processes} devices, but there are {processes}; try:"
            f" {nearest}"
        )
    return replace(layout, zero=resolve_zero_stage(layout, zero))


def resolve_zero_stage(layout: Layout, zero: int | None) -> int:
    """Return the ZeRO stage: `zero` if given, else 3 with a dp_shard and 0 without.

    Raises:
        PlanError: the stage does not exist, or these degrees do not allow it.
    """
    if zero is not None and zero not in (0, 1, 2, 3):
        raise PlanError(f"layout.zero = {zero}: a stage is 0, 1, 2 or 3; try: layout.zero=3")
    if layout.dp_shard == 1:
        if zero:
            raise PlanError(
                f"layout.zero = {zero}: splits over layout.dp_shard, which is 1; try: "
                f"layout.dp_shard={max(2, layout.dp_replicate)}"
            )
        return 0
    if zero == 0:
        raise PlanError(
            f"layout.zero = 0: splits nothing over layout.dp_shard = {layout.dp_shard}; try: "
            f"layout.zero=3, or layout.dp_replicate={layout.data_degree}"
        )
    if zero in (1, 2) and layout.dp_replicate > 1:
        raise PlanError(
            f"layout.zero = {zero}: carries dp_shard alone, got dp_replicate = "
            f"{layout.dp_replicate} × dp_shard = {layout.dp_shard}; try: layout.zero=3 (hsdp), "
            f"or layout.dp_shard={layout.data_degree}"
        )
    return 3 if zero is None else zero
