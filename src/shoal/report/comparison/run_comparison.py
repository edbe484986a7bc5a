"""Facts of a comparison: differences of losses, keys that differ, losses at equal amounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.base.text.units import count_text, seconds_text
from shoal.report.comparison.compared_runs import FEW_RUNS, ComparisonRun
from shoal.report.comparison.key_differences import KeyDifference, list_key_differences
from shoal.report.comparison.loss_differences import (
    SPREADS,
    LossDifference,
    compare_losses,
    losses_before,
    mean_loss,
    spread_of_means,
)
from shoal.report.sections.curves import Curve, list_curves

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST_SHARE = 0.1
"""Part of the longest run from which a run may be the shortest one."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Parts of the longest run at which losses are compared."""


@dataclass
class Comparison:
    """Runs beside each other; the first one is the baseline.

    Attributes:
        runs: at least one.
        problems: a line per folder that is left out.
    """

    runs: list[ComparisonRun]
    problems: list[str]

    @cached_property
    def differences(self) -> list[LossDifference]:
        """Return the differences of each further run from the first."""
        return [compare_losses(self.runs[0].series, run.series) for run in self.runs[1:]]

    @cached_property
    def keys(self) -> list[KeyDifference]:
        """Return the keys whose values differ."""
        return list_key_differences([run.keys for run in self.runs])

    @cached_property
    def curves(self) -> list[Curve]:
        """Return the charts of all runs; by source of data only for few runs."""
        curves = list_curves([run.contents for run in self.runs])
        few = len(self.runs) <= FEW_RUNS
        unit = "tokens or targets" if len({run.unit for run in self.runs}) > 1 else ""
        return [
            replace(curve, title=f"{unit} per second")
            if unit and curve.key == "tokens_per_s"
            else curve
            for curve in curves
            if curve.key != "sources" or few
        ]

    @cached_property
    def points(self) -> list[EqualPoint]:
        """Return amounts of tokens and of time, with the loss of each run there."""
        found = []
        if len({run.unit for run in self.runs}) == 1:
            found += self._equal_points(self.runs[0].unit, lambda run: run.series.tokens)
        return found + self._equal_points("time", lambda run: run.series.seconds)

    def _equal_points(
        self, kind: str, amounts_of: Callable[[ComparisonRun], Array]
    ) -> list[EqualPoint]:
        totals = [float(amounts[-1]) for amounts in map(amounts_of, self.runs) if len(amounts)]
        positive = [total for total in totals if 0 < total < 1e300]
        if not positive:
            return []
        most = max(positive)
        shared = min(total for total in positive if total >= LEAST_SHARE * most)
        amounts = sorted({shared, *(share * most for share in SHARES)})
        return [
            EqualPoint(
                kind,
                amount,
                tuple(losses_before(run.series, amounts_of(run), amount) for run in self.runs),
                amount == shared,
            )
            for amount in amounts
        ]

    @property
    def has_equal_losses(self) -> bool:
        """Return whether all runs have the first one's losses at all steps in common."""
        return bool(self.differences) and all(one.is_equal for one in self.differences)

    def summary(self) -> str:
        """Return the earliest differences of any run from the first, as one sentence."""
        if not self.differences:
            return "one run: nothing to compare it with"
        if len(self.differences) == 1:
            return self.differences[0].text()
        first = self.runs[0].label
        pairs = list(zip(self.runs[1:], self.differences, strict=True))
        if not any(one.common_steps for one in self.differences):
            return f"no run has a step in common with {first}"
        differ = [pair for pair in pairs if pair[1].first_step is not None]
        if not differ:
            return f"no run differs from {first} in a loss"
        run, found = min(differ, key=lambda pair: pair[1].first_step or 0)
        text = f"first different loss: step {found.first_step:,} ({run.label})"
        separated = [pair for pair in pairs if pair[1].separation_step is not None]
        if not separated and not all(pair[1].is_long_enough for pair in differ):
            run, found = max(differ, key=lambda pair: pair[1].newest_spreads or 0.0)
            return f"{text}; {found.newest_text()} ({run.label})"
        if not separated:
            return f"{text}; none apart by more than three spreads"
        run, found = min(separated, key=lambda pair: pair[1].separation_step or 0)
        step = f"{found.separation_step:,}"
        return f"{text}; apart by more than three spreads from step {step} ({run.label})"


@dataclass(frozen=True)
class EqualPoint:
    """Losses of all runs at the same amount of tokens, targets or time.

    Attributes:
        kind: "tokens", "targets" or "time".
        amount: of it.
        windows: the 50 losses of each run before it; none of a run that did not reach it.
        is_shared: it is the end of the shortest run, of at least a tenth of the longest.
    """

    kind: str
    amount: float
    windows: tuple[Array, ...]
    is_shared: bool = False

    @cached_property
    def losses(self) -> list[float | None]:
        """Return the mean of the 50 losses of each run; None: it did not reach the amount."""
        return [mean_loss(window) for window in self.windows]

    def text(self) -> str:
        """Return the amount with its unit."""
        if self.kind == "time":
            return seconds_text(self.amount)
        return f"{count_text(self.amount)} {self.kind}"

    @property
    def winners(self) -> list[int]:
        """Return the indices of all runs with the least loss; none if fewer than two have one."""
        ranking = self.ranking
        least = self.losses[ranking[0]] if ranking else None
        return [at for at in ranking if self.losses[at] == least] if len(ranking) > 1 else []

    @property
    def ranking(self) -> list[int]:
        """Return the indices of the runs that reached it, the least loss first."""
        known = [(loss, at) for at, loss in enumerate(self.losses) if loss is not None]
        return [at for _, at in sorted(known)]

    def is_within_noise(self, one: int, other: int) -> bool:
        """Return whether the losses of two runs differ by at most three spreads."""
        losses = [self.losses[at] or 0.0 for at in (one, other)]
        spread = spread_of_means(self.windows[one], self.windows[other])
        return spread is not None and abs(losses[0] - losses[1]) <= SPREADS * spread
