"""How much slower or faster: the ratio of medians of paired step times, with an interval.

Formula   r = median(a) / median(b) over pairs (a_i, b_i) measured one right after the other; the
          95 % interval takes whole pairs again and again with replacement (percentile bootstrap),
          so whatever slows the machine down for both of a pair cancels.
Verdict   pass if the interval's upper end is at most the limit, fail if even its lower end is
          above, otherwise open: an inconclusive gate is not a passed one.
Source    Efron and Tibshirani 1993, ch. 13
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval."""
        return (self.high - self.low) / 2

    def verdict(self, limit: float) -> str:
        """pass, fail or open against an upper limit."""
        if self.high <= limit:
            return "pass"
        return "fail" if self.low > limit else "open"


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """median(ours) / median(theirs); entry i of both belongs to pair i.

    >>> ratio([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    Ratio(value=0.5, low=0.5, high=0.5)
    """
    a, b = np.asarray(ours), np.asarray(theirs)
    draws = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    many = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.percentile(many, [2.5, 97.5])
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high))
