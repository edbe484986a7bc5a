"""Checkpoint interval of Young, Daly and the exact optimum, and the goodput of a run.

A machine's failures are random, with a mean time M between them. A checkpoint stops the run for C
seconds, every τ seconds of work; a failure costs the work since the last checkpoint and R seconds
of detection, restart and loading.

    Young 1974    τ = √(2·C·M)
    Daly 2006     τ = √(2·C·M)·[1 + ⅓·√(C/2M) + (C/2M)/9] − C             for C < 2M, else M
    to 1st order  goodput ≈ 1 − C/τ − (τ/2 + R)/M
    exactly       goodput = τ / (M·(1 − e^(−(τ+C)/M))·e^((R+τ+C+D)/M))    exponential failures

The exact form counts failures during checkpoints, restarts and repeated work too. D ≤ τ is the time
from a checkpoint's stall until it is safe on disk (0: as soon as the stall ends). Derivation: the
run is safe at every kτ of work. From there an attempt takes a = τ + C to the next safe point. After
a failure it takes R + a + D, repeated until one fits between two failures, in the mean
M·(e^((R+a+D)/M) − 1). The first attempt ends after M·(1 − e^(−a/M)) in the mean, by success or
failure. With D = 0 this is Daly's equation for τ/goodput.
Sources: Young 1974 (CACM 17:9); Daly 2006 (FGCS 22:3), eq. 13, 20, 37; Llama-3 and Meta RSC for M.
"""

from __future__ import annotations

import math

from shoal.base.errors import PlanError, check_not_negative, check_positive

HOUR = 3600.0


def mtbf_s(devices: int, device_mtbf_s: float) -> float:
    """Return the mean time between failures of n devices of which any one stops the run: M₁/n.

    419 unexpected stops of 16 384 GPUs in 54 days are one per 3.1 hours: one per GPU in 5.8 years.

    >>> years = 54 / 365.25 * 16384 / 419
    >>> round(years, 1), round(mtbf_s(16384, years * 365.25 * 24), 1)
    (5.8, 3.1)
    """
    if devices < 1:
        raise PlanError(f"gpus = {devices}: at least 1; try: gpus=1")
    check_positive(device_mtbf_s=device_mtbf_s)
    return device_mtbf_s / devices


def young_interval_s(stall_s: float, mean_s: float) -> float:
    """Return the seconds of work between checkpoints by Young: √(2·C·M).

    A stall of 6 s with 7.9 hours between failures: every 9.7 minutes.

    >>> round(young_interval_s(6, 7.9 * 3600) / 60, 1)
    9.7
    """
    check_positive(mtbf=mean_s)
    check_not_negative(stall_s=stall_s)
    return math.sqrt(2 * stall_s * mean_s)


def daly_interval_s(stall_s: float, mean_s: float) -> float:
    """Return the seconds of work between checkpoints by Daly's higher order; M for C ≥ 2M.

    >>> [round(daly_interval_s(c, 3.1 * 3600) / 60, 1) for c in (60, 5)]
    [18.6, 5.5]
    """
    base = young_interval_s(stall_s, mean_s)
    if stall_s >= 2 * mean_s:
        return mean_s
    ratio = stall_s / (2 * mean_s)
    return base * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def first_order_goodput(
    interval_s: float, stall_s: float, restart_s: float, mean_s: float
) -> float:
    """Return goodput to first order: 1 − C/τ − (τ/2 + R)/M; below 0 if failures prevail.

    3.1 hours between failures, 10 minutes to restart: 0.84 with stalls of 60 s, 0.92 with 5 s.

    >>> [round(first_order_goodput(young_interval_s(c, 11160), c, 600, 11160), 2) for c in (60, 5)]
    [0.84, 0.92]

    Stalls of 6 s, 7.9 hours: about 2 % lost to saving and to repeated work.

    >>> round(1 - first_order_goodput(young_interval_s(6, 28440), 6, 0, 28440), 3)
    0.021
    """
    check_positive(interval_s=interval_s, mtbf=mean_s)
    check_not_negative(stall_s=stall_s, restart_s=restart_s)
    return 1 - stall_s / interval_s - (interval_s / 2 + restart_s) / mean_s


def goodput(
    interval_s: float, stall_s: float, restart_s: float, mean_s: float, write_s: float = 0.0
) -> float:
    """Return the exact goodput, the share of the time that is progress, for random failures.

    Args:
        interval_s: τ, work between checkpoints.
        stall_s: C, the stall of a checkpoint.
        restart_s: R.
        mean_s: M, between failures.
        write_s: D, until the checkpoint is safe on disk, after the stall.

    Raises:
        PlanError: τ ≤ 0, M ≤ 0, negative times or D > τ (checkpoints would pile up).

    >>> [round(goodput(young_interval_s(c, 11160), c, 600, 11160), 3) for c in (60, 5)]
    [0.853, 0.92]
    >>> round(goodput(1140, 6, 600, 11160), 3), round(goodput(1140, 6, 600, 11160, 300), 3)
    (0.895, 0.871)
    """
    check_positive(interval_s=interval_s, mtbf=mean_s)
    check_not_negative(stall_s=stall_s, restart_s=restart_s, write_s=write_s)
    if write_s > interval_s:
        raise PlanError(
            f"write_s = {write_s:g}: a checkpoint must be on disk before the next begins, after "
            f"{interval_s:.0f} s; try: write_s={interval_s:.0f}, or interval_s={write_s:g}"
        )
    attempt = (interval_s + stall_s) / mean_s
    again = (restart_s + write_s) / mean_s + attempt
    if again > 700:
        return 0.0
    return interval_s / mean_s / (-math.expm1(-attempt) * math.exp(again))


def best_interval_s(stall_s: float, restart_s: float, mean_s: float, write_s: float = 0.0) -> float:
    """Return the τ with the highest exact goodput, found by golden-section search.

    Daly's interval is close to it.

    Raises:
        PlanError: a stall of 0, for which the best interval is 0.

    >>> round(best_interval_s(60, 600, 11160) / 60, 2), round(daly_interval_s(60, 11160) / 60, 2)
    (18.63, 18.63)
    """
    check_positive(stall_s=stall_s)
    low, high = (
        max(write_s, 1e-3 * stall_s, 1e-9),
        max(4 * young_interval_s(stall_s, mean_s), 2 * write_s),
    )
    low, high = math.log(low), math.log(max(high, 2 * mean_s))
    golden = (math.sqrt(5) - 1) / 2

    def at(place: float) -> float:
        return goodput(math.exp(place), stall_s, restart_s, mean_s, write_s)

    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if at(left) < at(right):
            low = left
        else:
            high = right
    return max(math.exp((low + high) / 2), write_s)


def time_shares(
    interval_s: float, stall_s: float, restart_s: float, mean_s: float, write_s: float = 0.0
) -> dict[str, float]:
    """Return the shares of the time, with sum 1: work, stalls, restarts, repeated work.

    Restarts take R·(failures per second) of the time, less the part that the next failure cuts
    short. The remainder, neither progress nor restart nor a checkpoint that counted, is repeated
    work.

    >>> {k: round(v, 3) for k, v in time_shares(1157, 60, 600, 11160).items()}
    {'work': 0.853, 'checkpoints': 0.044, 'restarts': 0.052, 'work done again': 0.051}
    """
    good = goodput(interval_s, stall_s, restart_s, mean_s, write_s)
    stalls = good * stall_s / interval_s
    restarts = -math.expm1(-restart_s / mean_s)
    return {
        "work": good,
        "checkpoints": stalls,
        "restarts": restarts,
        "work done again": max(0.0, 1 - good - stalls - restarts),
    }
