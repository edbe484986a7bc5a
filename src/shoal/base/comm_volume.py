"""What a divided model makes travel, stated when it is divided: exchanges, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorExchange:
    """A collective over the tensor-parallel ranks that every micro-batch repeats.

    kind           all_reduce, all_gather, reduce_scatter · when  forward or backward
    payload_bytes  the tensor that is summed, or that is there after gathering
    count          times per micro-batch
    """

    kind: str
    when: str
    payload_bytes: int
    count: int = 1


@dataclass(frozen=True)
class Crossing:
    """What passes between two neighbouring stages with one micro-batch.

    forward_bytes   values, those that only pass through included
    backward_bytes  their gradients, of those that have one
    """

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Travel:
    """What one micro-batch of `samples` samples makes travel in a divided model.

    exchanges      of each stage: collectives over its tensor-parallel ranks
    crossings      between each stage and the next, on one tensor-parallel rank

    Stages are those of one copy of the model.
    """

    samples: int
    exchanges: tuple[tuple[TensorExchange, ...], ...]
    crossings: tuple[Crossing, ...] = ()
