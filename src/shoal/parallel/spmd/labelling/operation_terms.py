"""Data classes of labelling: steps, conflicts and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from shoal.base.plans.placement import Groups
from shoal.parallel.spmd.labelling.labels import Label, Split
from shoal.parallel.spmd.labelling.rules import LabelRule


class IndivisibleSequence(Exception):
    """Raised if the sequence does not divide: use plain tensor parallelism instead."""

    def __init__(self, shape: Sequence[int], dim: int, degree: int) -> None:
        size = shape[dim] if dim < len(shape) else "missing"
        super().__init__(
            f"dim {dim} of the input {list(shape)} is {size}: not {degree} equal parts"
        )


@dataclass(frozen=True)
class OperationStep:
    """Call of one operation on a rank.

    Attributes:
        wants: the label of each tensor that the call receives.
        once: positions of tensors that only rank 0 passes.
    """

    wants: tuple[Label, ...]
    rule: LabelRule
    once: frozenset[int] = frozenset()


@dataclass(frozen=True)
class GatherConflict:
    """Split value that must be gathered, with the operation that needs it and its weights.

    Attributes:
        output: position of the value among the layer's results, if it is one.
        dear: the value need not be gathered: it is summed over ranks, which costs more than it
            saves.
    """

    node: fx.Node
    value: fx.Node
    origins: tuple[str, ...]
    output: int | None = None
    dear: bool = False


@dataclass(frozen=True)
class WeightChoice:
    """Choice for a weight matrix: kind is split, whole, column or row."""

    kind: str = "split"
    groups: Groups = 1


def may_stay_split(label: Label) -> bool:
    """Return whether a reader can join an output's parts along one dim."""
    return isinstance(label, Split) and label.groups == 1
