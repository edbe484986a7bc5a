"""Steps from which the losses of two runs differ: in a bit, and by more than their noise.

Two runs are compared at the steps that both recorded (common steps).

    first difference  the first common step whose losses differ in a bit. metrics.jsonl has every
                      digit of a loss, so equal numbers are equal floats.
    separation        the first common step from which the means of the newest 50 losses differ by
                      more than three spreads

The spread is that of the difference of two means of 50 steps with independent noise:
sqrt((σ_a² + σ_b²) / 50). σ is the noise of one step's loss within these 50 steps: the standard
deviation of the changes from step to step, divided by √2, so a falling loss is no noise.
The means must stay more than three spreads apart for 50 steps, or for the last 25 common ones:
chance alone rarely does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WINDOW = 50
"""Steps of a mean."""
SPREADS = 3.0
HOLD_STEPS, LAST_STEPS = 50, 25
"""Steps in which two runs stay separated · fewest of them at the end of the shorter run."""
LEAST_STEPS = WINDOW + LAST_STEPS - 1
"""Fewest common losses in which a separation can be found."""
BLOCK = 1 << 14
"""Windows that are computed at a time: their temporaries take 6 MiB."""


@dataclass(frozen=True)
class LossSeries:
    """Losses of a run by step.

    Attributes:
        steps: [rows] step numbers, ascending.
        losses: [rows] NaN where a row has none, or none that is finite.
        tokens: [rows] tokens (or targets) up to and with a row.
        seconds: [rows] seconds of steps up to and with a row.
    """

    steps: Array
    losses: Array
    tokens: Array
    seconds: Array


@dataclass(frozen=True)
class LossDifference:
    """Differences of the losses of two runs.

    Attributes:
        common_steps: number of steps that both recorded.
        last_step: the last of them; 0 without any.
        first_step: the first step whose losses differ in a bit; None: all are equal.
        first_losses: the two losses at that step; NaN: not a number.
        separation_step: the first step of a separation; None: none.
        is_long_enough: there are enough common steps to find a separation.
        newest_mean: mean of (second − first) over the newest common steps, at most 50.
        newest_spread: the spread of that mean.
    """

    common_steps: int
    last_step: int
    first_step: int | None = None
    first_losses: tuple[float, float] | None = None
    separation_step: int | None = None
    is_long_enough: bool = False
    newest_mean: float | None = None
    newest_spread: float | None = None

    @property
    def is_equal(self) -> bool:
        """Return whether both runs have steps in common, and equal losses there."""
        return self.common_steps > 0 and self.first_step is None

    def text(self) -> str:
        """Return the first different step and the separation as one sentence.

        >>> LossDifference(400, 400, 3, (2.0, 2.5), 120, True).text()
        'first different loss: step 3; apart by more than three spreads from step 120'
        >>> LossDifference(400, 400).text(), LossDifference(0, 0).text()
        ('equal in every loss up to step 400', 'no step in common')
        """
        if not self.common_steps:
            return "no step in common"
        if self.first_step is None:
            return f"equal in every loss up to step {self.last_step:,}"
        return f"first different loss: step {self.first_step:,}; {self._separation_text()}"

    def _separation_text(self) -> str:
        if self.separation_step is not None:
            return f"apart by more than three spreads from step {self.separation_step:,}"
        if not self.is_long_enough:
            return f"{self.newest_text()} (from which step: needs {LEAST_STEPS} common losses)"
        return f"within three spreads up to step {self.last_step:,}"

    @property
    def newest_spreads(self) -> float | None:
        """Return how many spreads the newest losses are apart; None for too few of them."""
        if self.newest_mean is None or not self.newest_spread:
            return None
        return abs(self.newest_mean) / self.newest_spread

    def newest_text(self) -> str:
        """Return how far the newest losses are apart, for runs too short for a separation."""
        if self.newest_spreads is None:
            return "too short for a spread"
        count = min(WINDOW, self.common_steps)
        return f"{self.newest_spreads:.3g} spreads apart over the last {count} steps"


def compare_losses(first: LossSeries, second: LossSeries) -> LossDifference:
    """Return the steps from which two runs differ; the module's docstring defines them."""
    import numpy as np

    common, one, other = _common_losses(first, second)
    if not len(common):
        return LossDifference(0, 0)
    at, last = _first_unequal(one, other), int(common[-1])
    both = ~(np.isnan(one) | np.isnan(other))
    one_known, other_known = one[both], other[both]
    newest = slice(-min(WINDOW, len(one_known)), None)
    mean, spread = mean_difference(one_known[newest], other_known[newest])
    long_enough = int(both.sum()) >= LEAST_STEPS
    if at is None:
        return LossDifference(len(common), last, None, None, None, long_enough, mean, spread)
    index = find_separation(one_known, other_known)
    return LossDifference(
        common_steps=len(common),
        last_step=last,
        first_step=int(common[at]),
        first_losses=(float(one[at]), float(other[at])),
        separation_step=None if index is None else int(common[both][index]),
        is_long_enough=long_enough,
        newest_mean=mean,
        newest_spread=spread,
    )


def first_difference_text(first: LossSeries, second: LossSeries) -> str:
    """Return the first step whose losses differ in a bit, "equal", or "–" without common steps."""
    common, one, other = _common_losses(first, second)
    if not len(common):
        return "–"
    at = _first_unequal(one, other)
    return "equal" if at is None else f"{common[at]:,}"


def _first_unequal(one: Array, other: Array) -> int | None:
    """Return the first index at which two series differ in a bit; two missing losses are equal."""
    import numpy as np

    for begin in range(0, len(one), BLOCK):
        ours, theirs = one[begin : begin + BLOCK], other[begin : begin + BLOCK]
        differ = ours.view(np.int64) != theirs.view(np.int64)
        differ &= ~(np.isnan(ours) & np.isnan(theirs))
        if differ.any():
            return begin + int(differ.argmax())
    return None


def _common_losses(first: LossSeries, second: LossSeries) -> tuple[Array, Array, Array]:
    """Return the steps that both runs recorded, and the losses of each there."""
    import numpy as np

    if np.array_equal(first.steps, second.steps):
        return first.steps, first.losses, second.losses
    if not len(second.steps):
        return second.steps, second.losses, second.losses
    at = np.minimum(np.searchsorted(second.steps, first.steps), len(second.steps) - 1)
    common = second.steps[at] == first.steps
    return first.steps[common], first.losses[common], second.losses[at[common]]


def find_separation(one: Array, other: Array) -> int | None:
    """Return the index from which two series are separated; None: they never are.

    Args:
        one, other: [common steps] finite losses of the same steps.
    """
    import numpy as np

    if len(one) < LEAST_STEPS:
        return None
    blocks = []
    for begin in range(0, len(one) - WINDOW + 1, BLOCK):
        part = slice(begin, begin + BLOCK + WINDOW - 1)
        blocks.append(_exceeds_spreads(one[part], other[part]))
    separated = np.concatenate(blocks)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], separated.astype(np.int8), [0]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        needed = LAST_STEPS if end == len(separated) else HOLD_STEPS
        if end - begin >= needed:
            return int(begin) + WINDOW - 1
    return None


def mean_difference(one: Array, other: Array) -> tuple[float | None, float | None]:
    """Return the mean of (other − one), and its spread; None for too few or too large numbers.

    Args:
        one, other: [steps] losses of steps in a row.
    """
    import numpy as np

    if not len(one):
        return None, None
    with np.errstate(all="ignore"):
        mean = float((other - one).mean())
    return mean if np.isfinite(mean) else None, spread_of_means(one, other)


def spread_of_means(one: Array, other: Array) -> float | None:
    """Return the spread of the difference of two means; None for fewer than three losses each."""
    import numpy as np

    if min(len(one), len(other)) < 3:
        return None
    with np.errstate(all="ignore"):
        variance = sum(float(np.diff(part).var()) / 2 / len(part) for part in (one, other))
        spread = float(np.sqrt(variance))
    return spread if np.isfinite(spread) else None


def _exceeds_spreads(one: Array, other: Array) -> Array:
    """Return a mask of the windows whose means are more than three spreads apart."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view
    with np.errstate(all="ignore"):
        means = windows(other - one, WINDOW).mean(axis=1)
        variance = _noise_variances(one) + _noise_variances(other)
        return np.asarray(np.abs(means) > SPREADS * np.sqrt(variance / WINDOW))


def _noise_variances(series: Array) -> Array:
    """Return σ² of each window: half the variance of the changes from step to step."""
    import numpy as np

    changes, count = np.diff(series), WINDOW - 1
    sums = [np.concatenate(([0.0], np.cumsum(one))) for one in (changes, changes * changes)]
    mean, square = ((one[count:] - one[:-count]) / count for one in sums)
    return np.asarray(np.maximum(square - mean * mean, 0.0) / 2)


def losses_before(series: LossSeries, amounts: Array, amount: float) -> Array:
    """Return the 50 losses before a run reached an amount, without missing ones; empty: it did not.

    Args:
        series: losses of the run.
        amounts: [rows] tokens or seconds so far, ascending.
        amount: of tokens or seconds.
    """
    import numpy as np

    if not len(amounts) or amounts[-1] < amount * (1 - 1e-9):
        return np.zeros(0)
    end = min(len(amounts) - 1, int(np.searchsorted(amounts, amount * (1 - 1e-9)))) + 1
    window = series.losses[max(0, end - WINDOW) : end]
    return np.asarray(window[~np.isnan(window)])


def mean_loss(losses: Array) -> float | None:
    """Return the mean of losses; None if there are none, or it is not finite."""
    import numpy as np

    with np.errstate(all="ignore"):
        mean = float(losses.mean()) if len(losses) else np.nan
    return mean if np.isfinite(mean) else None
