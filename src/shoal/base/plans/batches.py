"""Cutting of a step into an ordered list of micro-batches, independent of the layout.

`train.batch` and `train.micro_batch` cut a step's samples into micro-batches 0, 1, 2, …; a layout
only decides which rank runs which (round robin: micro-batch i on data rank i mod degree). A step
never straddles an epoch, so the last step of an epoch holds what is left, its last micro-batch may
be short, and some ranks may have none. Positions count samples in one endless stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.base.errors import ConfigError
from shoal.base.layouts.layout import Layout


@dataclass(frozen=True)
class MicroBatchSpan:
    """Samples start … stop − 1 of the stream; `index`, from 0, is its number in the whole step."""

    index: int
    start: int
    stop: int


def cut_step(
    position: int, samples: int | None, batch: int, micro_batch: int
) -> list[MicroBatchSpan]:
    """Cut the step at stream position `position` into its micro-batches, of all ranks.

    A step has `batch` samples, or the rest of the epoch; its last micro-batch may be short.

    Args:
        samples: length of one epoch; None for a stream without epochs.
        batch: samples per optimizer step.
        micro_batch: samples per forward pass.

    >>> [(m.start, m.stop) for m in cut_step(8, 11, batch=8, micro_batch=2)]
    [(8, 10), (10, 11)]
    """
    stop = step_end(position, samples, batch)
    return [
        MicroBatchSpan(i, *span) for i, span in enumerate(rank_spans(position, stop, micro_batch))
    ]


def step_end(position: int, samples: int | None, batch: int) -> int:
    """Return the stream position at which the step that starts at `position` ends."""
    return position + (batch if samples is None else min(batch, samples - position % samples))


def rank_spans(
    start: int, stop: int, micro_batch: int, rank: int = 0, degree: int = 1
) -> list[tuple[int, int]]:
    """List (start, stop) of the micro-batches of a step that data rank `rank` of `degree` runs.

    Args:
        start, stop: stream positions of the step, over all ranks.

    In order: those with index mod degree = rank; the last one may be short. Rank −1 has none.

    >>> rank_spans(4, 9, 2), rank_spans(4, 9, 2, rank=1, degree=2)
    ([(4, 6), (6, 8), (8, 9)], [(6, 8)])
    """
    firsts = range(start + rank * micro_batch, stop, degree * micro_batch) if rank >= 0 else ()
    return [(first, min(first + micro_batch, stop)) for first in firsts]


def default_turn(batch: int) -> int:
    """Return the samples per turn of a stream if the user sets no micro-batch.

    An eighth of the batch, if 8 divides it. So 1, 2, 4 and 8 ranks each read whole turns, and the
    order of sharded data depends neither on the layout nor on its micro-batch.

    Args:
        batch: samples per optimizer step, over all ranks.

    Returns:
        batch / gcd(batch, 8) samples.

    >>> default_turn(32), default_turn(6), default_turn(5)
    (4, 3, 5)
    """
    return batch // math.gcd(batch, 8)


def divisors(number: int) -> list[int]:
    """List the divisors of a positive number, ascending.

    >>> divisors(12), divisors(1)
    ([1, 2, 3, 4, 6, 12], [1])
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def proof_batch(layout: Layout, micro_batch: int) -> tuple[int, int]:
    """Return a step's samples in the proof before a run, and its micro-batch: at most 2 samples.

    Two micro-batches for each data rank, so that gradients accumulate, and in a pipeline for each
    of its ranks too, which every schedule can run. Ranks that share a micro-batch (tp, cp) add
    none, since one process must compute them as well.

    >>> proof_batch(Layout(dp_replicate=4), 16), proof_batch(Layout(pp=2, tp=2), 16)
    ((16, 2), (8, 2))
    """
    few = min(micro_batch, 2)
    return 2 * layout.data_degree * layout.pp * few, few


def steps_per_epoch(samples: int, batch: int) -> int:
    """Count the optimizer steps of one epoch: samples / batch, rounded up.

    >>> steps_per_epoch(11, 4)
    3
    """
    return -(-samples // batch)


def samples_per_rank(batch: int, degree: int) -> int:
    """Return the samples of one data-parallel rank in a full step.

    Args:
        batch: samples per optimizer step, over all ranks.
        degree: data-parallel ranks.

    Raises:
        ConfigError: the ranks do not divide the batch; it names the nearest batch.

    >>> samples_per_rank(24, 4)
    6
    """
    share, rest = divmod(batch, degree)
    if rest:
        raise ConfigError(
            f"train.batch = {batch}: does not divide over {degree} data-parallel ranks; "
            f"try: train.batch={_multiple(batch, degree)}"
        )
    return share


def check_batch(batch: int, micro_batch: int, degree: int) -> int:
    """Return the micro-batches per data rank and full step; refuse a remainder.

    Args:
        batch, micro_batch: samples per optimizer step over all ranks, and per forward pass.
        degree: data-parallel ranks.

    Raises:
        ConfigError: micro_batch × degree does not divide batch; with the nearest legal batch, and
            the nearest micro_batch if one divides.

    >>> check_batch(24, 2, 4)
    3
    """
    unit = micro_batch * degree
    if batch % unit == 0:
        return batch // unit
    close = _multiple(batch, unit)
    share, rest = divmod(batch, degree)
    other = "" if rest else f", or train.micro_batch={nearest_divisor(share, micro_batch)}"
    raise ConfigError(
        f"train.batch = {batch}: not divisible by train.micro_batch {micro_batch} × "
        f"{degree} data-parallel ranks = {unit}; try: train.batch={close}{other}"
    )


def _multiple(number: int, unit: int) -> int:
    """Return the multiple of `unit`, at least one, nearest to `number`; the smaller of two."""
    lower = number // unit * unit
    return min((n for n in (lower, lower + unit) if n), key=lambda n: abs(n - number))


FAR = 100_000
"""Search range for a divisor, so that a batch of billions gets an answer too."""


def nearest_divisor(number: int, near: int) -> int:
    """Return the divisor of `number` nearest to `near`, the smaller of two; 1 if all are far.

    >>> nearest_divisor(12, 5), nearest_divisor(2**31 - 1, 1000), nearest_divisor(2**40, 3)
    (4, 1, 2)
    """
    near = min(near, number)
    for off in range(min(near, FAR)):
        for found in (near - off, near + off):
            if number % found == 0:
                return found
    return 1
