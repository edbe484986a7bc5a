"""Learning-rate range test: a short run whose rate grows every step, until the loss diverges.

    rate of step k of n    least · (most / least)^(k / (n − 1))
    smoothed loss          s ← 0.98·s + 0.02·loss, divided by 1 − 0.98^k (the start is not 0)
    it ends                where s is over 4 times its least, or a step's numbers broke
    named value            a tenth of the rate at which s is least
Source   the test: Smith 2017 (1506.01186); smoothing, end and value: `lr_find` of fastai
         (Howard and Gugger 2020, 2002.04688)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.base.errors import TrainingError
from shoal.config.resolve import make_plan
from shoal.config.sections import Config
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.trainer.guards.optimizer_checks import ScheduleLength
from shoal.trainer.jobs.configured_run import open_run
from shoal.trainer.run import Run
from shoal.wire.phases import iter_with_progress

KEPT = 0.98
"""Decay of the smoothed loss at each step."""
BLOWN_UP = 4.0
"""The test ends when the smoothed loss is so many times its minimum."""
BELOW = 10.0
"""The suggested rate is the rate of the least loss divided by this."""


@dataclass(frozen=True)
class RangeTestResult:
    """Result of a learning-rate range test.

    Attributes:
        rates, losses, smoothed: of each step, in their order.
        named: the suggested rate.
        ended: why the test ended before its last step; "" if it did not.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    ended: str

    @property
    def named(self) -> float:
        """Return a tenth of the rate at which the smoothed loss is least."""
        return self.rates[self.smoothed.index(min(self.smoothed))] / BELOW

    @property
    def is_range_too_short(self) -> bool:
        """Return whether the least loss is at the first or last rate: the range is too short."""
        place = self.smoothed.index(min(self.smoothed))
        return place == 0 or (place == len(self.smoothed) - 1 and not self.ended)


def smooth_losses(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the exponential moving average of losses, corrected for its start.

    >>> [round(one, 6) for one in smooth_losses((2.0, 2.0, 4.0))]
    [2.0, 2.0, 2.68018]
    """
    held, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        held = KEPT * held + (1 - KEPT) * loss
        found.append(held / (1 - KEPT**number))
    return tuple(found)


def run_range_test(
    config: Config, source: Source, world: World, *, least: float, most: float, steps: int
) -> RangeTestResult:
    """Train a fresh model of a configuration with a rate that grows from `least` to `most`.

    The run writes nothing.

    Raises:
        TrainingError: the first step breaks already.
        PlanError, ConfigError: as `open_run`.
    """
    run = open_run(config, source, world, make_plan(config), "single")
    run.rate.length = ScheduleLength()  # no schedule: the rate is set here
    batches = _repeat_loader(run, source)
    rates: list[float] = []
    losses: list[float] = []
    ended = ""
    for number in iter_with_progress("range test", steps, range(steps)):
        rate = least * (most / least) ** (number / (steps - 1))
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        result = run.step(next(batches))
        if result.skipped:
            ended = f"step {number + 1}, at {rate:.1e}, had numbers that are not finite"
            break
        rates.append(rate)
        losses.append(result.loss)
        smoothed = smooth_losses(tuple(losses))
        if smoothed[-1] > BLOWN_UP * min(smoothed):
            ended = f"at {rate:.1e} the smoothed loss is over {BLOWN_UP:g} times its least"
            break
    run.close()
    if not rates:
        raise TrainingError(
            f"range test: {ended}; try: a smaller --from, or precision.compute=fp32"
        )
    return RangeTestResult(tuple(rates), tuple(losses), smooth_losses(tuple(losses)), ended)


def _repeat_loader(run: Run, source: Source) -> Iterator[StepBatch]:
    loader = run.loader(source.train, collate=source.collate)
    while True:
        yield from loader
