"""The micro-batch is the atom of training: a step is an ordered list of them, whatever the layout.

`train.batch` and `train.micro_batch` cut a step's samples into micro-batches 0, 1, 2, …; a layout
only decides which rank runs which (round robin: micro-batch i on data rank i mod degree). A step
never straddles an epoch, so the last step of an epoch holds what is left, its last micro-batch may
be short, and some ranks may have none. Positions count samples in one endless stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.base.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """Samples at stream positions start … stop − 1; `index` is its number in the step."""

    index: int
    start: int
    stop: int


def cut_step(position: int, samples: int | None, batch: int, micro_batch: int) -> list[MicroBatch]:
    """The micro-batches of the step that begins at `position`.

    samples      length of one epoch; None for a stream without epochs
    batch        samples per optimizer step · micro_batch  samples per forward pass

    >>> [(m.start, m.stop) for m in cut_step(8, 11, batch=8, micro_batch=2)]
    [(8, 10), (10, 11)]
    """
    left = batch if samples is None else min(batch, samples - position % samples)
    return cut_span(position, position + left, micro_batch)


def cut_span(start: int, stop: int, micro_batch: int) -> list[MicroBatch]:
    """The micro-batches of a step over the positions start … stop − 1.

    >>> [(m.start, m.stop) for m in cut_span(4, 7, 2)]
    [(4, 6), (6, 7)]
    """
    starts = range(start, stop, micro_batch)
    return [MicroBatch(i, first, min(first + micro_batch, stop)) for i, first in enumerate(starts)]


def owned(micro_batches: list[MicroBatch], rank: int, degree: int) -> list[MicroBatch]:
    """Those micro-batches that data rank `rank` of `degree` runs, in order.

    >>> [m.index for m in owned(cut_step(0, None, 6, 1), rank=1, degree=4)]
    [1, 5]
    """
    return [m for m in micro_batches if m.index % degree == rank]


def default_micro_batch(batch: int) -> int:
    """Samples per forward pass when nobody says: a portion of the batch, never of the layout.

    An eighth where 8 divides the batch, so that 1, 2, 4 and 8 ranks can share it.

    >>> default_micro_batch(32), default_micro_batch(6), default_micro_batch(5)
    (4, 3, 5)
    """
    return batch // math.gcd(batch, 8)


def steps_per_epoch(samples: int, batch: int) -> int:
    """Optimizer steps in one epoch, the short last one included.

    >>> steps_per_epoch(11, 4)
    3
    """
    return -(-samples // batch)


def check_batch(batch: int, micro_batch: int, degree: int) -> int:
    """How many micro-batches each data rank accumulates per full step.

    Errors: ConfigError when batch is not micro_batch × accumulate × degree, with the nearest legal
    values of both.

    >>> check_batch(24, 2, 4)
    3
    """
    unit = micro_batch * degree
    if batch % unit == 0:
        return batch // unit
    lower = batch // unit * unit
    candidates = [b for b in (lower, lower + unit) if b > 0]
    close = min(candidates, key=lambda b: abs(b - batch))
    divisors = [m for m in range(1, batch + 1) if batch % (m * degree) == 0]
    micro = min(divisors, key=lambda m: abs(m - micro_batch)) if divisors else None
    other = f", or train.micro_batch={micro}" if micro else ""
    raise ConfigError(
        f"train.batch = {batch}: not divisible by train.micro_batch {micro_batch} × "
        f"{degree} data-parallel ranks = {unit}; nearest legal: train.batch={close}{other}"
    )
