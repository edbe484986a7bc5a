"""First difference between two records of steps: of numbers by step, of tensors by time.

Tensors of a step are compared in the order in which it computes them: weights that it met, outputs
of the model's parts, gradients, weights that it left. The first that differs is the finding; later
ones are its consequences. Gradients are computed from the last part to the first, so they are
compared backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.replay.step_marks import (
    FORWARD,
    GRADIENTS,
    KINDS,
    NUMBERS,
    Marks,
    StepMarks,
    relative_gap,
)

ROUNDED = ("loss", "grad_norm")
"""Keys of a row that another layout or format changes by rounding."""


@dataclass(frozen=True)
class NumberDifference:
    """The first numbers of two rows that differ: their step, key, and both values."""

    step: int
    key: str
    values: tuple[object, object]

    @property
    def relative(self) -> float:
        """Return the difference as a share of the larger value; inf for what is no number."""
        first, second = self.values
        if not (is_number(first) and is_number(second)):
            return math.inf
        return abs(first - second) / max(abs(first), abs(second), 1e-300)


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor of two steps that differs.

    Attributes:
        step, kind, name: of the tensor.
        gap: least relative difference that the norms show; inf: another shape, or missing on one
            side.
        differing, compared: tensors of this kind that differ, and all of them.
    """

    step: int
    kind: str
    name: str
    gap: float
    differing: int
    compared: int


def find_number_difference(
    first: Mapping[int, Record],
    second: Mapping[int, Record],
    *,
    bound_at: Callable[[int], float] = lambda step: 0.0,
    keys: Iterable[str] = NUMBERS,
) -> NumberDifference | None:
    """Return the first number that differs, over the steps that both have.

    Args:
        bound_at: returns the largest relative difference of loss and gradient norm that counts as
            equal in a step; 0: bits.
        keys: keys to compare, where both rows have them.
    """
    for step in sorted(first.keys() & second.keys()):
        for key in keys:
            here, there = first[step].get(key), second[step].get(key)
            if key not in first[step] or key not in second[step] or here == there:
                continue
            found = NumberDifference(step, key, (here, there))
            if key in ROUNDED and found.relative <= bound_at(step):
                continue
            return found
    return None


def find_largest_difference(
    first: Mapping[int, Record], second: Mapping[int, Record]
) -> NumberDifference | None:
    """Return the largest relative difference of loss or gradient norm; None: all are equal."""
    found = [
        one
        for key in ROUNDED
        for step in first.keys() & second.keys()
        if (one := find_number_difference({step: first[step]}, {step: second[step]}, keys=[key]))
    ]
    return max(found, key=lambda one: one.relative, default=None)


def find_tensor_difference(first: StepMarks, second: StepMarks) -> TensorDifference | None:
    """Return the first tensor of two records of one step that differs; None: all have equal bits.

    Outputs are compared only if both sides recorded the same parts: a layout that replaces parts
    records fewer.
    """
    for kind in KINDS:
        here, there = first.marks.get(kind, {}), second.marks.get(kind, {})
        if kind == FORWARD and here.keys() != there.keys():
            continue
        names = [*here, *(name for name in there if name not in here)]
        differing = [name for name in names if _differs(here, there, name)]
        if differing:
            name = differing[-1] if kind == GRADIENTS else differing[0]
            gap = (
                relative_gap(here[name], there[name]) if _has_both(here, there, name) else math.inf
            )
            return TensorDifference(first.step, kind, name, gap, len(differing), len(names))
    return None


def _has_both(here: Marks, there: Marks, name: str) -> bool:
    return name in here and name in there and here[name].shape == there[name].shape


def _differs(here: Marks, there: Marks, name: str) -> bool:
    return not _has_both(here, there, name) or here[name].digest != there[name].digest
