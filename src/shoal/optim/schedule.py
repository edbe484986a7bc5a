"""Learning-rate schedules as pure functions of the step, so that they resume exactly.

Every schedule is a factor on the group's own learning rate: it rises linearly over the warm-up
(step 0 already has 1/warmup of it, never 0), then
  constant    1
  linear      1 → 0
  cosine      ½(1 + cos πt), down to a tenth                         (Loshchilov and Hutter 2017)
  wsd         1, then a linear fall to 0 over the last fifth          (Hu et al. 2024, MiniCPM)
  one-cycle   up over 30 % from 1/25, down to 1/10⁴ of the peak, cosine   (Smith and Topin 2019)
"""

from __future__ import annotations

import math

from shoal.base.layouts.policies import OptimizerPolicy

COSINE_FLOOR = 0.1
WSD_DECAY_SHARE = 0.2
ONE_CYCLE_RISE, ONE_CYCLE_START, ONE_CYCLE_END = 0.3, 1 / 25, 1e-4


def warmup_steps(policy: OptimizerPolicy, total_steps: int) -> int:
    """Return the steps of linear warm-up: the policy's, or a tenth of the run.

    >>> warmup_steps(OptimizerPolicy(), 200)
    20
    """
    return policy.warmup_steps if policy.warmup_steps >= 0 else max(1, total_steps // 10)


def lr_factor(policy: OptimizerPolicy, step: int, total_steps: int) -> float:
    """Return the factor on the learning rate at `step` (0-based) of `total_steps`.

    The factor rises linearly to 1 over the warm-up (a tenth of the run if warmup_steps is −1),
    then: constant 1 · linear to 0 · cosine to 0.1 · wsd 1, over the last fifth to 0. one-cycle has
    its own rise, 30 % from 1/25, and falls to 1/10⁴. Beyond the last step the factor stays at its
    last value.

    >>> [lr_factor(OptimizerPolicy(schedule="linear", warmup_steps=2), s, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if policy.schedule == "one-cycle":
        return _one_cycle(step, total_steps)
    rise = warmup_steps(policy, total_steps)
    if step < rise:
        return (step + 1) / rise
    done = min(1.0, (step - rise) / max(1, total_steps - rise))
    if policy.schedule == "constant":
        return 1.0
    if policy.schedule == "linear":
        return 1.0 - done
    if policy.schedule == "wsd":
        return min(1.0, (1.0 - done) / WSD_DECAY_SHARE)
    return COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def _one_cycle(step: int, total_steps: int) -> float:
    done = min(1.0, step / max(1, total_steps - 1))
    if done < ONE_CYCLE_RISE:
        low, high, share = ONE_CYCLE_START, 1.0, done / ONE_CYCLE_RISE
    else:
        low, high = 1.0, ONE_CYCLE_END
        share = (done - ONE_CYCLE_RISE) / (1 - ONE_CYCLE_RISE)
    return low + (high - low) * 0.5 * (1 - math.cos(math.pi * share))
