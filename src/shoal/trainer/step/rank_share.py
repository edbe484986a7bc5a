"""This rank's share of one optimizer step: its micro-batches, and the busiest rank's count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shoal.base.errors import ClusterError
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.batches.batch_split import split_into_micro_batches
from shoal.trainer.batches.batch_values import Readings


@dataclass(slots=True)
class RankShare:
    """This rank's part of one step.

    Attributes:
        micro_batches: (index in the step, value) of each.
        rounds: micro-batches of the busiest rank.
        spare: a micro-batch for passes of weight 0, or None if no rank needs one.
    """

    micro_batches: list[tuple[int, Any]]
    rounds: int = 0
    spare: Any = None


def build_rank_share(
    program: Program, batch: Any, cut: int, first_key: int, kept: Any, known: Readings
) -> RankShare:
    """Split a batch into this rank's micro-batches; every rank calls it.

    Args:
        program: the run's.
        batch: of `run.loader`, or this rank's own samples.
        cut: samples per micro-batch of the user's own batches; 0: do not split.
        first_key: added to the indices.
        kept: a spare micro-batch of an earlier step, or None.
        known: how earlier batches read their lists.
    """
    micro_batches = list_own_micro_batches(batch, cut, program.data, known)
    micro_batches = [(first_key + index, value) for index, value in micro_batches]
    rounds, fewest = count_passes(program, batch, len(micro_batches))
    own = micro_batches[-1][1] if micro_batches else None
    spare = choose_spare_micro_batch(program, batch, own, kept, rounds, fewest)
    return RankShare(micro_batches, rounds, spare)


def list_own_micro_batches(
    batch: Any, cut: int, world: World, known: Readings | None = None
) -> list[tuple[int, Any]]:
    """Return (index in the step, value) of every micro-batch that this rank runs.

    Args:
        batch: of `run.loader`, or this rank's own samples.
        cut: samples per micro-batch of the user's own batches; 0: do not split.
        world: the data-parallel ranks.
        known: how earlier batches read their lists.
    """
    if isinstance(batch, StepBatch):
        return [(m.index, m.value) for m in batch.micro_batches]
    if _is_pair(batch) and not 0 < cut < batch[0].shape[0]:
        return [(world.rank, batch)]
    parts = split_into_micro_batches(batch, cut, known)
    return [(place * world.size + world.rank, part) for place, part in enumerate(parts)]


def _is_pair(batch: Any) -> bool:
    """Return whether a batch is two tensors with equal numbers of samples, as (inputs, targets)."""
    if type(batch) is not tuple or len(batch) != 2:
        return False
    sizes = [one.shape[0] if isinstance(one, torch.Tensor) and one.ndim else 0 for one in batch]
    return 0 < sizes[0] == sizes[1]


def count_unreadable(batch: Any) -> float:
    """Return the number of samples that this rank could not read."""
    return float(len(batch.left_out)) if isinstance(batch, StepBatch) else 0.0


def count_passes(program: Program, batch: Any, own: int) -> tuple[int, int]:
    """Return the most and the fewest micro-batches of a rank; every rank calls it.

    `own` twice, if ranks need not run equally many.
    """
    world = program.data
    if not _needs_equal_passes(program):
        return own, own
    if isinstance(batch, StepBatch):
        most = max(batch.by_rank, default=-(-batch.total // world.size))
        return most, min(batch.by_rank, default=batch.total // world.size)
    return world.find_extremes(own)


def choose_spare_micro_batch(
    program: Program, batch: Any, own: Any, kept: Any, rounds: int, fewest: int
) -> Any:
    """Return a micro-batch for passes of weight 0, on ranks that have fewer than others.

    In the first step after a start, an uneven last batch of an epoch, no rank has kept one. Then a
    rank that has one broadcasts its own to all.

    Args:
        program: the run's.
        batch: of `run.loader`, or this rank's own samples.
        own: this rank's last one, or None.
        kept: one of an earlier step, or None.
        rounds, fewest: the result of `count_passes`.

    Raises:
        ConfigError: a micro-batch holds other objects than tensors, numbers and texts; on all
            ranks.
        ClusterError: this rank could not read any sample of a run's first step.
    """
    world, spare = program.data, kept if own is None else own
    if not (_needs_equal_passes(program) and program.together):
        return spare
    if fewest and spare is None and isinstance(batch, StepBatch) and batch.left_out:
        raise ClusterError(f"{batch.left_out[0].text}; rank {world.rank} has no other sample yet")
    if fewest or not rounds or world.all_true(spare is not None):  # all call it, or none
        return spare
    from shoal.trainer.step.borrowed_batch import (
        broadcast_spare_batch,  # a first step of few samples
    )

    given = broadcast_spare_batch(world, own)
    return given if spare is None else spare


def _needs_equal_passes(program: Program) -> bool:
    return program.data.size > 1 and (program.together or program.plan.layout.zero == 2)
