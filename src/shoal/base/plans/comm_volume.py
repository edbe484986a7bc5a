"""What a divided model makes travel, stated when it is divided: exchanges, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorExchange:
    """One collective over the tensor-parallel ranks, as every micro-batch repeats it.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter.
        when: forward or backward.
        payload_bytes: the whole tensor: that is summed, or that is there after gathering.
        count: how many equal ones per micro-batch.
    """

    kind: str
    when: str
    payload_bytes: int
    count: int = 1


@dataclass(frozen=True)
class Crossing:
    """What one micro-batch of one tensor-parallel rank sends from one pipeline stage to the next.

    Attributes:
        forward_bytes: values sent to the next stage, those that only pass through it included.
        backward_bytes: gradients sent back for them: floating-point values have one, others none.
    """

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Travel:
    """The messages of one micro-batch of `samples` samples in a model that tp and pp divide.

    Attributes:
        exchanges: by stage: the collectives over its tensor-parallel ranks.
        crossings: by boundary, between stage 0 and 1, 1 and 2, …: on one tensor-parallel rank; ()
            without a pipeline.

    Stages are those of one copy of the model.
    """

    samples: int
    exchanges: tuple[tuple[TensorExchange, ...], ...]
    crossings: tuple[Crossing, ...] = ()
