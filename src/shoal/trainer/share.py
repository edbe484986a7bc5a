"""This rank's share of one optimizer step: its micro-batches, and the busiest rank's number."""

from __future__ import annotations

from typing import Any

from shoal.base.errors import ConfigError
from shoal.data.step import StepBatch
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.contract import batch_length, cut_batch


def own_micro_batches(batch: Any, cut: int, world: World) -> list[tuple[int, Any]]:
    """(number in the step, value) of every micro-batch that this rank runs.

    batch   of `run.loader`, or this rank's own samples · cut  samples of a micro-batch of such a
            batch; 0: it is one
    """
    if isinstance(batch, StepBatch):
        return [(m.index, m.value) for m in batch.micro_batches]
    parts = cut_batch(batch, max(1, cut or batch_length(batch)))
    return [(place * world.size + world.rank, part) for place, part in enumerate(parts)]


def busiest(program: Program, batch: Any, own: int, *, has_spare: bool) -> int:
    """Micro-batches of the busiest rank; asked only where ranks must send equally often.

    own      this rank's · has_spare  it has seen a batch with which it can join
    Errors   ConfigError on all ranks where one of them must join and never saw a batch
    """
    world, layout = program.data, program.plan.layout
    if world.size == 1 or not (program.together or layout.zero == 2):
        return own
    if isinstance(batch, StepBatch):
        rounds, fewest = -(-batch.total // world.size), batch.total // world.size
    else:
        rounds, fewest = world.largest(own), -world.largest(-own)
    joins = program.together and fewest == 0 < rounds  # the same on all ranks, so all vote
    if joins and not world.all_true(own > 0 or has_spare):
        raise ConfigError(
            f"layout {layout.strategy}: the first step has no sample for some ranks, which must "
            f"run the model with the others; nearest: a smaller micro_batch, or layout zero2"
        )
    return rounds
