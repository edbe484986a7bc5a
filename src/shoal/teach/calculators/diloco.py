"""Traffic of islands that average their weights only every H steps (DiLoCo and its variants).

    bytes per worker and step   2(R−1)/R · β·P / H         R workers, P parameters, β bytes each
    seconds per outer step      2(R−1)/R · β·P / W + ε     W bytes/s of a worker's link, ε latency
    compute utilisation         H·t / (H·t + seconds)      t seconds per inner step, nothing hidden
    less traffic, times         H · bits before / bits on the wire

β is 4 for fp32, 2 for bf16, 1 for 8-bit codes, 0.5 for 4-bit. Compared with data parallel that sums
bf16 gradients every step, H = 100 in 4 bits sends 400 times less; compared with fp32 in 8 bits too,
so a factor means nothing without its baseline. The papers report the loss of quality by H and by
the codec, which is not arithmetic.
Sources: DiLoCo (Douillard et al. 2023); Streaming DiLoCo (Douillard et al. 2025); INTELLECT-1
(Jaghouar et al. 2024).
"""

from __future__ import annotations

from shoal.base.errors import PlanError, check_positive
from shoal.teach.calculators.collectives_costs import ring_all_reduce_s

OUTER_STATE_BYTES = 8.0
"""Bytes per parameter: outer momentum and last round's weights, fp32; may be on the host."""


def bytes_per_outer_step(parameters: float, workers: int, wire_bits: float) -> float:
    """Return the bytes that one worker sends, and receives, per outer step of a ring.

    Raises:
        PlanError: less than 1 worker, or no bits.

    >>> bytes_per_outer_step(10e9, 2, 16) / 1e9
    20.0
    """
    check_positive("4", bits=wire_bits)
    return ring_all_reduce_s(workers, parameters * wire_bits / 8, 0.0, 1.0)


def bytes_per_step(parameters: float, workers: int, wire_bits: float, period: int) -> float:
    """Return the bytes that one worker sends per inner step, as the mean over a round of H.

    Streaming DiLoCo, 1B, FP4, H = 100: 400 times less than bf16 in every step.

    >>> bytes_per_step(1e9, 2, 16, 1) / bytes_per_step(1e9, 2, 4, 100)
    400.0
    """
    check_period(period)
    return bytes_per_outer_step(parameters, workers, wire_bits) / period


def outer_step_s(parameters: float, workers: int, wire_bits: float, bytes_per_s: float) -> float:
    """Return the seconds of the ring all-reduce of one outer step, without latency.

    10B parameters in int8 between 14 workers of 4 Gbit/s take 37 s. INTELLECT-1 measured 103 s
    within one country and 469 s across three continents: slow members, not bytes, dominated there.

    >>> round(outer_step_s(10e9, 14, 8, 4e9 / 8), 1)
    37.1
    """
    if bytes_per_s <= 0:
        raise PlanError(f"bytes_per_s = {bytes_per_s:g}: must be more than 0; try: 125e6")
    return bytes_per_outer_step(parameters, workers, wire_bits) / bytes_per_s


def utilisation(compute_s: float, waiting_s: float) -> float:
    """Return the share of the time in which a worker computes.

    INTELLECT-1, 38 minutes of inner steps per round and all-reduces of 103, 382 and 469 s (printed:
    95.7, 85.6, 83.0):

    >>> [round(100 * utilisation(2280, t), 1) for t in (103, 382, 469)]
    [95.7, 85.6, 82.9]
    """
    check_positive(compute_s=compute_s)
    return compute_s / (compute_s + waiting_s)


def traffic_reduction(period: int, wire_bits: float, compared_bits: float) -> float:
    """Return the factor by which traffic falls against an all-reduce in `compared_bits` each step.

    INTELLECT-1 100 · 32/8, Streaming 100 · 16/4, DiLoCo 500; SparseLoCo's codec alone 146.

    >>> traffic_reduction(100, 8, 32), traffic_reduction(100, 4, 16), traffic_reduction(500, 32, 32)
    (400.0, 400.0, 500.0)
    >>> round(traffic_reduction(1, 64 * (12 + 2) / 4096, 32))
    146
    """
    check_period(period)
    check_positive("4", bits=wire_bits)
    return period * compared_bits / wire_bits


def check_period(period: int) -> None:
    """Refuse a number of inner steps below 1.

    Raises:
        PlanError: period < 1.
    """
    if period < 1:
        raise PlanError(f"period = {period}: at least 1 inner step; try: period=1")
