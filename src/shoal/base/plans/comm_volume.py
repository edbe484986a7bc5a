"""Communication volume of a split model: exchanges, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorExchange:
    """One collective over the tensor-parallel ranks, repeated by every micro-batch.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter.
        when: forward or backward.
        payload_bytes: bytes of the whole tensor: summed, or present after gathering.
        count: equal collectives per micro-batch.
    """

    kind: str
    when: str
    payload_bytes: int
    count: int = 1


@dataclass(frozen=True)
class StageTransfer:
    """Bytes that one tensor-parallel rank sends per micro-batch from one stage to the next.

    Attributes:
        forward_bytes: values sent to the next stage, including those for later stages.
        backward_bytes: gradients sent back for the floating-point values among them.
    """

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class CommVolume:
    """Messages of one micro-batch of `samples` samples in a model that tp and pp split.

    Attributes:
        exchanges: by stage: the collectives over its tensor-parallel ranks.
        crossings: by boundary, between stage 0 and 1, 1 and 2, …: on one tensor-parallel rank; ()
            without a pipeline.

    Stages are those of one copy of the model.
    """

    samples: int
    exchanges: tuple[tuple[TensorExchange, ...], ...]
    crossings: tuple[StageTransfer, ...] = ()
