"""Does it fit? A predicted peak against what a device has: fits, tight or no.

    fits    the upper end of the interval is within the capacity
    tight   the capacity lies inside the interval: it may run, or die at the loss's peak
    no      even the lower end is more than the capacity; or, while starting, all weights at once
            are, whatever the steps would need

The interval is what published runs were missed by at most (docs/planner-memory.md), so "fits" keeps
less than a tenth of the capacity in reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.base.estimate import MemoryEstimate
from shoal.base.units import bytes_text


@dataclass(frozen=True)
class Verdict:
    """The word, the bytes left (below 0: missing) at the predicted peak, and one line.

    largest   name of the part that fills most, beside weights, gradients and optimizer
    starts    whether the device holds what a run has there before its first step
    after     the word for the steps alone, if the run had started
    """

    word: str
    margin_bytes: float
    text: str
    largest: str = ""
    starts: bool = True
    after: str = "fits"


STAYING = ("weights", "gradients", "optimizer")


def verdict(estimate: MemoryEstimate, capacity_bytes: float) -> Verdict:
    """Whether a predicted peak fits into `capacity_bytes` of one device.

    Errors   PlanError for a capacity that is not more than 0

    >>> peak = MemoryEstimate({"weights": 40e9, "loss": 30e9}, 70e9, 70e9, "loss", 0, 64e9, 76e9)
    >>> [verdict(peak, size).word for size in (80e9, 72e9, 60e9)]
    ['fits', 'tight', 'no']
    >>> from dataclasses import replace
    >>> verdict(replace(peak, start_bytes=90e9), 80e9).text
    'no, while starting: 83.8 of 74.5 GiB, 9.3 GiB missing; its steps: fits'
    >>> verdict(peak, 80e9).text
    'fits: 65.2 of 74.5 GiB, 9.3 GiB left; first to give way: loss (27.9 GiB)'
    """
    if not capacity_bytes > 0:
        raise PlanError(f"memory of a device = {capacity_bytes:g} bytes: more than 0 is needed")
    margin = capacity_bytes - estimate.peak_bytes
    if estimate.high_bytes <= capacity_bytes:
        word = "fits"
    elif estimate.low_bytes > capacity_bytes:
        word = "no"
    else:
        word = "tight"
    fleeting = {name: size for name, size in estimate.parts.items() if name not in STAYING}
    largest = max(fleeting, key=lambda name: fleeting[name], default="")
    share = f"{estimate.peak_bytes / 2**30:.1f} of {capacity_bytes / 2**30:.1f} GiB"
    left = f"{bytes_text(margin)} left" if margin >= 0 else f"{bytes_text(-margin)} missing"
    ends = f"; first to give way: {largest} ({bytes_text(fleeting[largest])})" if largest else ""
    text = f"{word}: {share}, {left}{ends}"
    starts = estimate.start_bytes <= capacity_bytes
    if not starts and word != "no":
        share = f"{estimate.start_bytes / 2**30:.1f} of {capacity_bytes / 2**30:.1f} GiB"
        lacks = bytes_text(estimate.start_bytes - capacity_bytes)
        text = f"no, while starting: {share}, {lacks} missing; its steps: {word}"
    return Verdict(word if starts else "no", margin, text, largest, starts, after=word)
