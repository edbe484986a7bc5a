"""Skipped steps and spikes: count both, find their causes, and stop a run that skips too many.

One bad step is an accident: all ranks skip it, and an event names rank, micro-batches and samples.
Many in a row are a diverged run or broken data, which a restart would only repeat.

A step is a spike if its loss or gradient norm is far above those of earlier steps:

    rule   more than 8 robust deviations above the median of the last 128 steps that counted, once
           there are 16. The deviation is 1.4826 times the median distance from the median, and at
           least 2 % of the median for a loss, 25 % for a norm, which is 3 times the median then.
           Sooner, from the second step on: 30 times the median
    tell   an event and a line name the step and its samples; the update is made
    skip   the update is made on no rank; rewind: see `rewind.py`

Loss and norm are sums over all ranks, so every rank decides alike without communication. A
checkpoint keeps the values that decide, so a resumed run decides like an unbroken one. In mode
"tell" the window takes in every step: a new level is reported for some time, then it is normal.

Source: OLMo-core's rule (6 deviations over 128 steps, active after 64); medians, because the window
contains the spikes too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.base.errors import TrainingError
from shoal.trainer.step.optimizer_step import StepTotals, UpdateResult

if TYPE_CHECKING:
    from shoal.trainer.metrics_recorder import MetricsRecorder
    from shoal.trainer.step.loss_scale import LossScale


WINDOW, LEAST, DEVIATIONS, SOONER = 128, 16, 8.0, 30.0
ROBUST = 1.4826
"""Factor from the median distance to the standard deviation, for normally distributed numbers."""
FLOORS = {"loss": 0.02, "gradient norm": 0.25}
"""Smallest deviation, as a share of the median."""


class SkipCounter:
    """Counts of skipped steps in a row (`limit` of which end the run) and of `lost` samples.

    `steps`, `skipped` and `spiked` count what this process made since its start. A loop of the
    user's own (`is_own_loop`) in which no step moved a weight ends in an error.
    """

    def __init__(self, limit: int, unreadable: int = 0) -> None:
        self.limit, self.unreadable, self.lost = limit, unreadable, 0
        self.in_a_row = self.steps = self.skipped = self.spiked = 0
        self.any_moved = self.is_own_loop = self.are_totals_printed = False
        self.last_reason = "fp16 overflowed at every loss scale"

    def record_step(
        self,
        step: int,
        done: UpdateResult,
        tally: StepTotals,
        batch: Any,
        scale: LossScale | None,
        recorder: MetricsRecorder,
    ) -> None:
        """Count a finished step, and report a skipped update or lost samples; every rank calls it.

        Raises:
            ClusterError: as in `report_unreadable`.
            TrainingError: as in `skip`.
        """
        world, emit, tell = recorder.world, recorder.events.emit, recorder.warn
        self.steps += 1
        if count := int(sum(tally.numbers.sums("unreadable"))):
            from shoal.trainer.step.unreadable_samples import report_unreadable

            report_unreadable(self, step, count, batch, world, emit, tell)
        ranks = tally.broken_ranks() if tally.broken else []
        if scale is not None and scale.update(done, tally):
            if world.writes_files:
                emit("loss_scale_lowered", step=step, ranks=ranks, scale=scale.value)
        elif done.skipped:
            ranks = list(range(world.size)) if done.spike else ranks
            from shoal.trainer.step.unreadable_samples import report_skip

            is_spike = bool(done.spike)
            report_skip(self, step, done.reason, ranks, batch, world, emit, tell, spike=is_spike)
        else:
            self.moved()
            if done.spike:
                from shoal.trainer.step.unreadable_samples import report_spike

                report_spike(self, step, done.spike, batch, world, emit, tell)
        if done.spike and recorder.folder is not None and world.writes_files:
            from shoal.checkpoint.format.folders import keep_step_before

            with suppress(OSError):  # a full disk must not stop the run
                keep_step_before(recorder.folder / "checkpoints", step)

    def print_totals(self, tell: Callable[[str], None]) -> None:
        """Print the counts of skipped steps, spikes and samples left out, if there are any."""
        self.are_totals_printed = True
        if self.skipped or self.spiked or self.lost or (self.steps and not self.any_moved):
            from shoal.trainer.step.unreadable_samples import format_totals

            tell(format_totals(self))

    def moved(self) -> None:
        """Note that a step moved the weights."""
        self.in_a_row, self.any_moved = 0, True

    def state(self) -> dict[str, int]:
        """Return the number of samples left out, as JSON; {} for none."""
        return {"unreadable": self.lost} if self.lost else {}

    def check_moved(self, first: int, last: int, so: str = "no weight moved") -> None:
        """Raise TrainingError, on all ranks, if no step after `first` moved a weight.

        Args:
            first: steps made before these.
            last: steps made by now.
            so: the consequence, for the message.
        """
        if last > first and not self.any_moved:
            from shoal.trainer.step.unreadable_samples import suggest_remedy

            raise TrainingError(
                f"steps {first + 1} – {last}: all were skipped: {self.last_reason}; {so}; "
                f"{suggest_remedy(self.last_reason)}"
            )


class SpikeDetector:
    """Detector of spikes in loss and gradient norm, from a window of the last steps.

    Attributes:
        mode: tell, skip, rewind, off.
        skips: whether the update of a spike is skipped.
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.skips = mode, mode in ("skip", "rewind")
        self.known = {name: _Window() for name in FLOORS}

    def judge(self, loss: float, norm: float) -> str:
        """Return why a step is a spike, or "" for a normal step, which enters the window."""
        if self.mode == "off":
            return ""
        values = dict(zip(FLOORS, (loss, norm), strict=True))
        found = [
            text for name, value in values.items() if (text := self._describe_leap(name, value))
        ]
        if not (found and self.skips):
            for name, value in values.items():
                self.known[name].add(value)
        if len(found) == 1 and not found[0].startswith("loss "):
            found.append(f"with a loss of {loss:.4g}")  # whether the sample was hard or broken
        return ", ".join(found)

    def state(self) -> dict[str, Any]:
        """Return the windows as JSON; {} if no decision depends on them."""
        if not self.skips:
            return {}
        return {"spikes": {name: list(window.values) for name, window in self.known.items()}}

    def load(self, record: dict[str, Any]) -> None:
        """Restore the windows of a checkpoint's record."""
        for name in FLOORS:
            self.known[name] = _Window(map(float, record.get("spikes", {}).get(name, ())))

    def _describe_leap(self, name: str, value: float) -> str:
        known = self.known[name].values
        if not known:
            return ""
        middle = self.known[name].median()
        if len(known) < LEAST:
            if not 0 < SOONER * middle < value:
                return ""
            return f"{name} {value:.4g} is {value / middle:.0f} times {middle:.4g}, the usual one"
        if value <= middle + DEVIATIONS * FLOORS[name] * abs(middle):
            return ""  # no deviation is smaller
        middle, deviation = median_and_deviation(known, FLOORS[name])
        if not deviation or not value > middle + DEVIATIONS * deviation:
            return ""
        far = min((value - middle) / deviation, 1e9)
        return (
            f"{name} {value:.4g} is {far:.0f} deviations above {middle:.4g}, the median of the "
            f"last {len(known)} steps"
        )


class _Window:
    """Last values of a series, in order of arrival and sorted.

    >>> window = _Window([3.0, 1.0, 2.0])
    >>> window.add(10.0)
    >>> window.median(), list(window.values)
    (2.5, [3.0, 1.0, 2.0, 10.0])
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = deque[float](maxlen=WINDOW)
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Append a finite value; a full window drops the oldest one."""
        if len(self.values) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self.values[0])]
        self.values.append(value)
        insort(self._ordered, value)

    def median(self) -> float:
        """Return the middle value, or the mean of the middle two."""
        half = len(self._ordered) // 2
        if len(self._ordered) % 2:
            return self._ordered[half]
        return (self._ordered[half - 1] + self._ordered[half]) / 2


def median_and_deviation(values: Collection[float], floor: float) -> tuple[float, float]:
    """Return (median, robust standard deviation); the latter is at least `floor` × |median|.

    >>> median_and_deviation([1.0, 2.0, 3.0, 4.0, 1000.0], 0.0)
    (3.0, 1.4826)
    """
    middle = median(values)
    distance = ROBUST * median(abs(one - middle) for one in values)
    return middle, max(distance, floor * abs(middle)) if math.isfinite(middle) else 0.0
