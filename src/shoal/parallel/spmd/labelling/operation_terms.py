"""The nouns of labelling: how an operation is called, what stands in the way, what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from shoal.base.plans.placement import Groups
from shoal.parallel.spmd.labelling.labels import Label, Split
from shoal.parallel.spmd.labelling.rules import Rule


class NotSplit(Exception):
    """The sequence does not divide: use plain tensor parallelism."""

    def __init__(self, shape: Sequence[int], dim: int, degree: int) -> None:
        size = shape[dim] if dim < len(shape) else "missing"
        super().__init__(
            f"dim {dim} of the input {list(shape)} is {size}: not {degree} equal parts"
        )


@dataclass(frozen=True)
class Step:
    """How one operation is called on a rank.

    Attributes:
        wants: the label under which each tensor is handed in.
        once: places of tensors that only rank 0 hands in.
    """

    wants: tuple[Label, ...]
    rule: Rule
    once: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Conflict:
    """A split value that must be gathered, the operation that needs it, and who split it.

    Attributes:
        output: its place among the layer's results, if it is one.
        dear: it need not be gathered: it is summed over ranks, which costs more than its size is
            worth.
    """

    node: fx.Node
    value: fx.Node
    origins: tuple[str, ...]
    output: int | None = None
    dear: bool = False


@dataclass(frozen=True)
class Choice:
    """What is to be done with a weight matrix: kind is split, whole, column or row."""

    kind: str = "split"
    groups: Groups = 1


def may_stay_split(label: Label) -> bool:
    """Whether an output can be handed on in parts that are simply put together along a dim."""
    return isinstance(label, Split) and label.groups == 1
