"""Pipeline bubble: the seconds of a step in which the rank that idles most has no work.

A rank's bubble is (end of its last action − start of its first − its work); the schedule's bubble
is the largest over ranks. F, B, W are the seconds that one RANK spends per micro-batch (all its
chunks together) on the forward, on the gradient of the input and on the gradient of the weights;
schedules that do not cut the backward spend B + W on it.

    gpipe, 1f1b   (p − 1)(F + B + W)
    interleaved   (p − 1)(F + B + W)/v
    zero-bubble   (p − 1)(B + max(0, F − W)), which is (p − 1)(F + B − W) up to W = F; m ≥ p
    zbv           0 where F = B = W and m ≥ 2p − 1
    dualpipe      (p/2 − 1)(F&B + (B + W) − 3W) where F = B = W, F&B one forward and one whole
                  backward as a block, here F + B + W: nothing overlaps

Where no formula is exact (zbv and dualpipe at other costs, fewer micro-batches) the action lists
are simulated once per ratio of costs, and cached. tests/planning compares formulas to simulated
lists.
Sources: GPipe (Huang et al. 2019), Megatron (Narayanan et al. 2021), Zero Bubble (Qi et al. 2023,
ZB-H1 and ZB-V), DeepSeek-V3 technical report (2024), table 2.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import canonical_schedule
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import check_schedule

COUNTED_RANKS = 32


def bubble_s(name: str, p: int, m: int, F: float, B: float, W: float = 0.0, v: int = 1) -> float:
    """Return a pipeline's bubble: seconds per step that the rank which idles most has no work.

    A rank's bubble is (end of its last action − start of its first − its work); p = 1 has none.

    Args:
        F, B, W: seconds that a rank spends per micro-batch, all its chunks together: on the
            forward, on the gradient of the input, on the gradient of the weights.
        p: ranks.
        m: micro-batches per step.
        v: chunks per rank; read for interleaved only.

    Raises:
        PlanError: unknown schedule. The function does not check that the schedule can run m
            micro-batches on p ranks; `make_schedule` does.

    >>> bubble_s("gpipe", 4, 8, 1.0, 1.0, 1.0), bubble_s("interleaved", 4, 8, 1.0, 1.0, 1.0, 3)
    (9.0, 3.0)
    >>> bubble_s("zero-bubble", 4, 8, 1, 1, 1), bubble_s("zbv", 4, 8, 1, 1, 1)
    (3.0, 0.0)
    >>> bubble_s("dualpipe", 8, 20, 1.0, 1.0, 1.0)
    6.0
    """
    known = canonical_schedule(name)
    if p == 1:
        return 0.0
    if known in ("gpipe", "1f1b"):
        return float((p - 1) * (F + B + W))
    if known == "interleaved":
        return (p - 1) * (F + B + W) / v
    if known == "dualpipe" and (F == B == W or p % 2 or m % 2 or m < 2 * p):
        return float(max(0.0, (p / 2 - 1) * (F + 2 * B - W)))
    if known == "zero-bubble" and m >= p:
        return float((p - 1) * (B + max(0.0, F - W)))
    if known == "zbv" and F == B == W and m >= 2 * p - 1:
        return 0.0
    return _simulated_bubble_s(known, p, m, F, B, W)


def _simulated_bubble_s(name: str, p: int, m: int, F: float, B: float, W: float) -> float:
    """Return the bubble from a simulated schedule, at costs rounded to a thousandth of their sum.

    Beyond two micro-batches per rank more of them add no bubble. It grows as p − 1 (zbv's to 3 %
    from 16 to 32 ranks; dualpipe's as p − 2), so that long pipelines are simulated at
    COUNTED_RANKS.
    """
    whole = F + B + W
    if whole <= 0:
        return 0.0
    ranks = min(p, COUNTED_RANKS)
    per_rank = -(-m // p) if p > ranks else 0
    few = min(m, 2 * ranks) if not per_rank else min(per_rank, 2) * ranks
    ratio = _simulate_bubble_s(name, ranks, few, round(F / whole, 3), round(B / whole, 3))
    ends = 2 if name == "dualpipe" and p > 2 else 1
    return ratio * whole * (p - ends) / (ranks - ends)


@lru_cache(maxsize=1024)
def _simulate_bubble_s(name: str, p: int, m: int, forward: float, back: float) -> float:
    return check_schedule(make_schedule(name, p, m), forward, back, 1.0 - forward - back).bubble_s


def micro_batches_in_flight(
    schedule: str, ranks: int, micro_batches: int, rank: int, chunks: int = 1
) -> float:
    """Return the most micro-batches whose activations one rank keeps, in shares of the rank.

    Raises:
        PlanError: unknown schedule.

    >>> [micro_batches_in_flight("1f1b", 4, 8, rank) for rank in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    >>> (
    ...     micro_batches_in_flight("interleaved", 4, 8, 0, chunks=2),
    ...     micro_batches_in_flight("gpipe", 4, 8, 3),
    ... )
    (5.5, 8.0)
    """
    name = canonical_schedule(schedule)
    if ranks == 1:
        return 1.0
    if name == "gpipe":
        kept = float(micro_batches)
    elif name == "1f1b":
        kept = ranks - rank
    elif name == "interleaved":
        kept = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks
    else:
        kept = ranks + (name == "dualpipe")
    return float(min(micro_batches, kept))


def describe_bubble(layout: Layout, batch: int, micro_batch: int) -> str:
    """Describe in one line the bubble of a pipeline, as a share of the step.

    Args:
        batch, micro_batch: values that `check_micro_batches` accepts.

    Returns:
        The share of a step. With fewer micro-batches than ranks the line also names a smaller
        micro_batch. "" without a pipeline.

    >>> describe_bubble(Layout(pp=4, schedule="1f1b"), 16, 2)
    'pipeline: 1f1b over 4 stages, 8 micro-batches per step: 27 % of it is bubble'
    >>> describe_bubble(Layout(pp=4, schedule="gpipe"), 16, 8).split("; ")[1]
    'fewer micro-batches than stages, more is better: train.micro_batch=4'
    """
    if layout.pp == 1:
        return ""
    samples = batch // layout.data_degree
    count = samples // micro_batch
    name, ranks = layout.schedule, layout.pp
    # A backward costs about two forwards, half of it for the weights' gradients.
    idle_s = bubble_s(name, ranks, count, 1.0, 1.0, 1.0, layout.chunks)
    text = (
        f"pipeline: {name} over {layout.stages} stages, {count} micro-batch"
        f"{'es' if count > 1 else ''} per step: {idle_s / (idle_s + 3 * count):.0%} of it is bubble"
    ).replace("%", " %")
    finer = next((m for m in range(micro_batch - 1, 0, -1) if samples % m == 0), 0)
    if count < ranks and finer:
        text += f"; fewer micro-batches than stages, more is better: train.micro_batch={finer}"
    return text
