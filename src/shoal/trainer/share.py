"""This rank's share of one optimizer step: its micro-batches, and the busiest rank's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.base.errors import ClusterError, ConfigError
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


def lost_of(batch: Any) -> float:
    """How many samples this rank could not read."""
    return float(len(batch.left_out)) if isinstance(batch, StepBatch) else 0.0


def busiest(program: Program, batch: Any, own: int) -> int:
    """Micro-batches of the busiest rank; asked only where ranks must send equally often."""
    world = program.data
    if not _must_meet(program):
        return own
    if isinstance(batch, StepBatch):
        return max(batch.by_rank, default=-(-batch.total // world.size))
    return world.all_reduce_max(own)


def to_join_with(program: Program, batch: Any, own: Any, kept: Any, rounds: int) -> Any:
    """A micro-batch for passes that count for nothing, on ranks that have fewer than others.

    own    this rank's last one, or None · kept  one of an earlier step, or None
    rounds as `busiest` gives them

    In the first step after a start, an uneven last batch of an epoch, nobody has kept one: then a
    rank that has one gives its own to all.
    Errors   ConfigError on all ranks where a micro-batch holds what is no tensor, number or text;
             ClusterError on a rank that could not read any sample of a run's first step
    """
    world, spare = program.data, kept if own is None else own
    if not (_must_meet(program) and program.together):
        return spare
    if isinstance(batch, StepBatch):
        fewest = min(batch.by_rank, default=batch.total // world.size)
    else:
        fewest = -world.all_reduce_max(-int(own is not None))
    if fewest and spare is None and isinstance(batch, StepBatch) and batch.left_out:
        raise ClusterError(f"{batch.left_out[0].text}; rank {world.rank} has no other sample yet")
    if fewest or not rounds or world.all_true(spare is not None):  # all ask, or none
        return spare
    given = _given(world, own)
    return given if spare is None else spare


def _must_meet(program: Program) -> bool:
    return program.data.size > 1 and (program.together or program.plan.layout.zero == 2)


def _given(world: World, own: Any) -> Any:
    """The last micro-batch of the first rank that has one, on every rank."""
    source = -world.all_reduce_max(-(world.size if own is None else world.rank))
    tensors: list[torch.Tensor] = []
    told = world.broadcast_json(_described(own, tensors), source)
    if told is None:
        raise ConfigError(
            "the first step has no sample for some ranks, which must run the model with the "
            "others, and what others have is more than tensors, numbers and texts in tuples, "
            "lists and dicts; try: a smaller micro_batch, or layout zero2"
        )
    held = iter(tensors)

    def receive(kind: str, shape: list[int]) -> torch.Tensor:
        if world.rank == source:
            sent = next(held)
        else:
            sent = torch.zeros(shape, dtype=getattr(torch, kind))
        raw = sent.detach().contiguous().reshape(-1).view(torch.uint8).to(world.device)
        if raw.numel():
            world.broadcast(raw, source)
        return raw.to(sent.device).view(sent.dtype).reshape(sent.shape)

    return _built(told, receive)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A micro-batch as JSON, its tensors by format and shape, in order; None if it is none."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if value is None or isinstance(value, str | bool | int | float):
        return ["plain", value]
    if type(value) in (tuple, list):
        parts = [_described(one, tensors) for one in value]
        return None if None in parts else [type(value).__name__, parts]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        named = {key: _described(one, tensors) for key, one in value.items()}
        return None if None in named.values() else ["dict", named]
    return None


def _built(told: Any, receive: Callable[[str, list[int]], torch.Tensor]) -> Any:
    """What `_described` said."""
    kind, *said = told
    if kind == "tensor":
        return receive(*said)
    if kind == "plain":
        return said[0]
    if kind == "dict":
        return {key: _built(one, receive) for key, one in said[0].items()}
    parts = [_built(one, receive) for one in said[0]]
    return tuple(parts) if kind == "tuple" else parts
