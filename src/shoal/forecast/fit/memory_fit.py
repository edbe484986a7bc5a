"""Does it fit? What every instant holds against what a device and a node have: fits, tight or no.

    fits    the upper end of the interval is within the capacity, at every instant
    tight   the capacity lies inside the interval at one: it may run, or die there
    no      even the lower end is more than the capacity at one, whatever the others need

The worst instant gives the word, and is named. The interval is what published runs were missed by
at most (docs/planner-memory.md), so "fits" keeps less than a tenth of the capacity in reserve. A
node's memory counts where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import Instant, MemoryEstimate
from shoal.base.text.units import bytes_text

WORDS = ("fits", "tight", "no")
"""From the best to the worst."""


@dataclass(frozen=True)
class Verdict:
    """The word, the bytes left (below 0: missing) at the steps' predicted peak, and one line.

    Attributes:
        largest: name of the part that fills most, beside weights, gradients and optimizer.
        after: the word for the steps alone, on their device.
        instant, place: another instant whose word is worse, and where: "device" or "host"; ""
            without.
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
        """Whether no other instant ends a run whose steps would fit."""
        return not (self.instant and self.word == "no")


STAYING = ("weights", "gradients", "optimizer")


def verdict(estimate: MemoryEstimate, capacity_bytes: float, node_bytes: float = 0.0) -> Verdict:
    """Whether a predicted run fits into devices of `capacity_bytes` and nodes of `node_bytes`.

    Args:
        node_bytes: 0: not known, and not looked at.

    Raises:
        PlanError: for a capacity that is not more than 0.

    >>> peak = MemoryEstimate({"weights": 40e9, "loss": 30e9}, 70e9, 70e9, "loss", 0, 64e9, 76e9)
    >>> [verdict(peak, size).word for size in (80e9, 72e9, 60e9)]
    ['fits', 'tight', 'no']
    >>> from dataclasses import replace
    >>> verdict(replace(peak, instants=(Instant("building", 90e9),)), 80e9).text
    'no: while building, 83.8 GiB on one device of 74.5 GiB, 9.3 GiB missing; its steps: fits'
    >>> verdict(replace(peak, instants=(Instant("saving", 70e9, 9e11),)), 80e9, 5e11).text
    "no: while saving, 838.2 GiB in a node's 465.7 GiB, 372.5 GiB missing; its steps: fits"
    >>> verdict(peak, 80e9).text
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
    text = f"{after}: {share}, {_left(margin)}{ends}"
    found = Verdict(after, margin, text, largest, after)
    for one in estimate.instants:
        for place, size, most in (
            ("device", one.device_bytes, capacity_bytes),
            ("host", one.host_bytes, node_bytes),
        ):
            told = _at(estimate, size, most) if most else "fits"
            if one.name == "step" and place == "device":
                continue  # `after` is its word, by the estimate's own interval
            if WORDS.index(told) > WORDS.index(found.word):
                where = _where(one, place, size, most)
                text = f"{told}: {where}; its steps: {after}"
                found = Verdict(told, margin, text, largest, after, one.name, place)
    return found


def _at(estimate: MemoryEstimate, size: float, capacity_bytes: float) -> str:
    """The word at another instant, whose interval is as wide as the steps'."""
    peak = estimate.peak_bytes or 1.0
    low, high = estimate.low_bytes / peak, estimate.high_bytes / peak
    return _word(size * low, size * high, capacity_bytes)


def _word(low_bytes: float, high_bytes: float, capacity_bytes: float) -> str:
    if high_bytes <= capacity_bytes:
        return "fits"
    return "no" if low_bytes > capacity_bytes else "tight"


def _where(one: Instant, place: str, size: float, most: float) -> str:
    """Says the instant, its bytes, and those of the device or the node."""
    of = "on one device of" if place == "device" else "in a node's"
    while_ = "in its first step" if one.name == "first step" else f"while {one.name}"
    while_ = "in a step" if one.name == "step" else while_
    return f"{while_}, {bytes_text(size)} {of} {bytes_text(most)}, {_left(most - size)}"


def _left(margin: float) -> str:
    return f"{bytes_text(margin)} left" if margin >= 0 else f"{bytes_text(-margin)} missing"
