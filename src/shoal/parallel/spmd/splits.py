"""What a plan for splitting a model says: of parameters, of classes of equal layers, of it all."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shoal.parallel.spmd.labels import Label
from shoal.parallel.spmd.split_block import BlockSplit, Exchange
from shoal.trace.calls import Call
from shoal.trace.vocabulary import Tables


@dataclass(frozen=True)
class ParameterSplit:
    """What a rank holds of one parameter.

    label     Split: a part; Whole: all of it
    partial   whole, but its gradient is a part on every rank: to be summed over tp once a step
    reason    one line
    """

    label: Label
    partial: bool
    reason: str


@dataclass(frozen=True)
class BlockClass:
    """Equal layers, split alike.

    names   of the layers in the model · split  for the sample's kind of input
    bare    one of them without numbers, for tracing other kinds of input
    call    the sample's call of the first one
    """

    names: tuple[str, ...]
    split: BlockSplit
    bare: nn.Module
    call: Call


@dataclass(frozen=True)
class ModelSplit:
    """How a model is computed by `degree` ranks.

    sequence     blocks hand each other parts of the sequence where they can
    classes      split layers · tables  split embeddings and heads
    parameters   every parameter by its first name
    exchanges    collectives of a forward and backward pass on the sample, by module
    notices      what stays whole that could be expected to be split, one line each
    scattered    embeddings that hand their rank's part of the sequence to the first block
    calls        how the sample called the layers, without numbers
    """

    degree: int
    sequence: bool
    classes: tuple[BlockClass, ...]
    tables: Tables
    parameters: dict[str, ParameterSplit]
    exchanges: dict[str, tuple[Exchange, ...]]
    notices: tuple[str, ...]
    scattered: frozenset[str] = frozenset()
    calls: dict[str, Call] = field(default_factory=dict)
