"""Time that n devices lose because each step waits for the slowest of them.

A step takes the largest of n times. If one device's time has the distribution F, the largest has
Fⁿ; its mean and its quantiles follow from one device's quantile function Q:

    mean of the largest      ∫ Q(u^(1/n)) du, u from 0 to 1
    its p-quantile           Q(p^(1/n))
    exponential tail         mean + s·(H_n − 1)       H_n = 1 + 1/2 + … + 1/n ≈ ln n + 0.577
    normal                   mean + s·z, z < √(2·ln n)   z = 3.24 for 1 000, 4.38 for 100 000
    permanently slow         1 − (1 − q)ⁿ             chance that one of n is among the slow share q

s is the standard deviation. Waiting only every k steps adds up k times before comparing, so for
spread that is new in every step the loss falls with √k; a device that is always slow gains nothing.
No loop runs over devices: the largest of n draws is one draw, Q(U^(1/n)).
Sources: order statistics (David and Nagaraja 2003, ch. 2 and 4); spread seen in practice: up to
14 % between GPUs on the same product, 9 % of the step at 64 000 GPUs (PRISM, as reported).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from shoal.base.errors import PlanError, check_choice, check_positive
from shoal.teach.calculators.scaling import check_devices

DISTRIBUTIONS = ("normal", "lognormal", "exponential")
"""All with the same mean and standard deviation; their tails differ."""

MOST_STEPS = 1_000_000
"""Most steps that are drawn: about a second."""

_NORMAL = NormalDist()


@dataclass(frozen=True)
class StepTimes:
    """Distribution of one device's step time: mean seconds, spread = deviation / mean, tail."""

    mean_s: float
    spread: float
    distribution: str = "normal"

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            PlanError: mean ≤ 0, a spread outside 0 to 1, or an unknown distribution.
        """
        check_choice("distribution", self.distribution, DISTRIBUTIONS, kind=PlanError)
        check_positive(step_s=self.mean_s)
        if not 0 <= self.spread <= 1:
            raise PlanError(
                f"spread = {self.spread:g}: deviation per mean, 0 to 1; try: "
                f"spread={min(1.0, max(0.0, self.spread)):g}"
            )

    def upper_quantile_s(self, above: float) -> float:
        """Return the seconds that a share `above` of the steps of one device exceeds.

        >>> round(StepTimes(1.0, 0.1).upper_quantile_s(0.025), 3)
        1.196
        """
        above = min(max(above, 1e-300), 1 - 1e-16)
        if self.distribution == "exponential":
            return self.mean_s * (1 + self.spread * (-math.log(above) - 1))
        z = -_NORMAL.inv_cdf(above)
        if self.distribution == "normal":
            return self.mean_s * (1 + self.spread * z)
        variance = math.log1p(self.spread**2)
        return self.mean_s * math.exp(math.sqrt(variance) * z - variance / 2)


def largest_mean_s(times: StepTimes, devices: int) -> float:
    """Return the expected seconds of the slowest of n devices in a synchronous step.

    E[max] = ∫ Q(u^(1/n)) du, with the quantiles Q of one device and u = exp(−exp(−g)). In g the
    integrand decays doubly exponentially, so a step width of 1 % gives all digits. Exponential
    tails have the closed form mean + s·(H_n − 1), which the integral reproduces.

    >>> round(largest_mean_s(StepTimes(1.0, 0.1), 2), 6) == round(1 + 0.1 / math.sqrt(math.pi), 6)
    True
    >>> round(largest_mean_s(StepTimes(1.0, 0.5, "exponential"), 4), 6)
    1.541667
    """
    check_devices(devices)
    if times.spread == 0:
        return times.mean_s
    step, total, mass = 0.05, 0.0, 0.0
    for place in range(-80, 800):
        rare = math.exp(-place * step)
        weight = rare * math.exp(-rare)
        mass += weight
        total += weight * times.upper_quantile_s(-math.expm1(-rare / devices))
    return total / mass


def waiting_share(times: StepTimes, devices: int, every: int = 1) -> float:
    """Return the mean share of the time that a device waits, if ranks synchronise every k steps.

    Args:
        every: k > 1: k steps of a device add up to about a normal time with √k of the deviation.

    >>> round(waiting_share(StepTimes(1.0, 0.05), 100_000), 3)
    0.18
    >>> round(waiting_share(StepTimes(1.0, 0.05), 100_000, every=100), 3)
    0.021
    """
    if every < 1:
        raise PlanError(f"every = {every}: at least 1 step; try: every=1")
    if every > 1:
        times = StepTimes(times.mean_s * every, times.spread / math.sqrt(every))
    # the sum that approximates the integral is off by 1e-15 without any waiting
    return max(0.0, 1 - times.mean_s / largest_mean_s(times, devices))


def chance_of_slow(devices: int, slow_share: float) -> float:
    """Return the chance that at least one of n devices is slow, which slows every step.

    One bad device in 10 000 and 16 384 in the run: four in five runs have one.

    >>> round(chance_of_slow(16_384, 1e-4), 3)
    0.806
    """
    check_devices(devices)
    if not 0 <= slow_share <= 1:
        raise PlanError(f"slow_share = {slow_share:g}: a share, 0 to 1; try: slow_share=0.001")
    return 1.0 if slow_share == 1 else -math.expm1(devices * math.log1p(-slow_share))


def simulate_steps(
    times: StepTimes, devices: int, steps: int, seed: int = 0
) -> tuple[float, float, float]:
    """Draw the seconds of `steps` steps of n devices; return mean, median and 99th percentile.

    One draw per step, whatever n is: the largest of n draws is Q(U^(1/n)).

    >>> mean, median, _ = simulate_steps(StepTimes(1.0, 0.05), 100_000, 2000)
    >>> abs(mean / largest_mean_s(StepTimes(1.0, 0.05), 100_000) - 1) < 0.002
    True
    """
    check_devices(devices)
    if not 1 <= steps <= MOST_STEPS:
        near = 1000 if steps < 1 else MOST_STEPS
        raise PlanError(f"steps = {steps}: 1 to {MOST_STEPS} are drawn; try: steps={near}")
    draw = random.Random(seed)
    seconds = sorted(
        times.upper_quantile_s(-math.expm1(math.log(1 - draw.random()) / devices))
        for _ in range(steps)
    )
    return sum(seconds) / steps, seconds[steps // 2], seconds[min(steps - 1, steps * 99 // 100)]
