"""Verdict on memory: compare each instant's bytes with the capacity of a device and a node.

    fits    the upper end of the interval is within the capacity, at every instant
    tight   the capacity lies inside the interval at an instant: the run may run out of memory
    no      at an instant even the lower end is above the capacity

The worst instant decides the verdict, which names it. The width of the interval is the largest
error on published runs (docs/proof/planner-memory.md), so "fits" keeps less than a tenth of the
capacity in reserve. A node's memory counts if it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import MemoryEstimate, MemoryInstant
from shoal.base.text.units import bytes_text

WORDS = ("fits", "tight", "no")
"""Verdicts from the best to the worst."""


@dataclass(frozen=True)
class MemoryVerdict:
    """Verdict on memory, the bytes left (below 0: missing) at the steps' peak, and one line.

    Attributes:
        largest: name of the largest part, apart from weights, gradients and optimizer.
        after: the verdict on the steps alone, on their device.
        instant, place: another instant with a worse verdict, and its place: "device" or "host"; ""
            if there is none.
    """

    word: str
    margin_bytes: float
    text: str
    largest: str = ""
    after: str = "fits"
    instant: str = ""
    place: str = ""

    @property
    def starts(self) -> bool:
        """Return whether a run whose steps would fit also passes every other instant."""
        return not (self.instant and self.word == "no")


STAYING = ("weights", "gradients", "optimizer")


def judge_memory(
    estimate: MemoryEstimate, capacity_bytes: float, node_bytes: float = 0.0
) -> MemoryVerdict:
    """Return the verdict on a run for devices of `capacity_bytes` and nodes of `node_bytes`.

    Args:
        node_bytes: 0: unknown, not compared.

    Raises:
        PlanError: capacity_bytes ≤ 0.

    >>> peak = MemoryEstimate({"weights": 40e9, "loss": 30e9}, 70e9, 70e9, "loss", 0, 64e9, 76e9)
    >>> [judge_memory(peak, size).word for size in (80e9, 72e9, 60e9)]
    ['fits', 'tight', 'no']
    >>> from dataclasses import replace
    >>> judge_memory(replace(peak, instants=(MemoryInstant("building", 90e9),)), 80e9).text
    'no: while building, 83.8 GiB on one device of 74.5 GiB, 9.3 GiB missing; its steps: fits'
    >>> judge_memory(
    ...     replace(peak, instants=(MemoryInstant("saving", 70e9, 9e11),)), 80e9, 5e11
    ... ).text
    "no: while saving, 838.2 GiB in a node's 465.7 GiB, 372.5 GiB missing; its steps: fits"
    >>> judge_memory(peak, 80e9).text
    'fits: 65.2 of 74.5 GiB, 9.3 GiB left; first to give way: loss (27.9 GiB)'
    """
    if not capacity_bytes > 0:
        raise PlanError(f"memory of a device = {capacity_bytes:g} bytes: more than 0 is needed")
    margin = capacity_bytes - estimate.peak_bytes
    after = _word(estimate.low_bytes, estimate.high_bytes, capacity_bytes)
    fleeting = {name: size for name, size in estimate.parts.items() if name not in STAYING}
    largest = max(fleeting, key=lambda name: fleeting[name], default="")
    share = f"{estimate.peak_bytes / 2**30:.1f} of {capacity_bytes / 2**30:.1f} GiB"
    ends = f"; first to give way: {largest} ({bytes_text(fleeting[largest])})" if largest else ""
    text = f"{after}: {share}, {_describe_margin(margin)}{ends}"
    found = MemoryVerdict(after, margin, text, largest, after)
    for one in estimate.instants:
        for place, size, most in (
            ("device", one.device_bytes, capacity_bytes),
            ("host", one.host_bytes, node_bytes),
        ):
            told = _word_at(estimate, size, most) if most else "fits"
            if one.name == "step" and place == "device":
                continue  # `after` is its verdict, by the estimate's own interval
            if WORDS.index(told) > WORDS.index(found.word):
                where = _describe_instant(one, place, size, most)
                text = f"{told}: {where}; its steps: {after}"
                found = MemoryVerdict(told, margin, text, largest, after, one.name, place)
    return found


def _word_at(estimate: MemoryEstimate, size: float, capacity_bytes: float) -> str:
    """Return the verdict on another instant, with an interval as wide as the steps'."""
    peak = estimate.peak_bytes or 1.0
    low, high = estimate.low_bytes / peak, estimate.high_bytes / peak
    return _word(size * low, size * high, capacity_bytes)


def _word(low_bytes: float, high_bytes: float, capacity_bytes: float) -> str:
    if high_bytes <= capacity_bytes:
        return "fits"
    return "no" if low_bytes > capacity_bytes else "tight"


def _describe_instant(one: MemoryInstant, place: str, size: float, most: float) -> str:
    """Describe the instant, its bytes, and the capacity of the device or the node."""
    of = "on one device of" if place == "device" else "in a node's"
    while_ = "in its first step" if one.name == "first step" else f"while {one.name}"
    while_ = "in a step" if one.name == "step" else while_
    return f"{while_}, {bytes_text(size)} {of} {bytes_text(most)}, {_describe_margin(most - size)}"


def _describe_margin(margin: float) -> str:
    return f"{bytes_text(margin)} left" if margin >= 0 else f"{bytes_text(-margin)} missing"
