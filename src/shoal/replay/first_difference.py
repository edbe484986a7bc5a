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
    whole_norm,
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
        gap: estimated norm of the difference, as a share of the tensor's norm (with a bound: of the
            norm of all tensors of its kind); inf: another shape, or missing on one side.
        differing, compared: tensors of this kind that differ, and all of them.
        bound: gap that counts as equal; 0: bits were compared.
    """

    step: int
    kind: str
    name: str
    gap: float
    differing: int
    compared: int
    bound: float = 0.0


def find_number_difference(
    first: Mapping[int, Record],
    second: Mapping[int, Record],
    *,
    bound_at: Callable[[int], float] = lambda step: 0.0,
    keys: Iterable[str] = NUMBERS,
) -> NumberDifference | None:
    """Return the first number that differs, over the steps that both runs recorded.

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


def find_tensor_difference(
    first: StepMarks, second: StepMarks, bound: float = 0.0
) -> TensorDifference | None:
    """Return the first tensor of two records of one step that differs; None: all are equal.

    Args:
        bound: largest distance that counts as equal, as a share of the norm of all tensors of the
            kind; 0: bits. Of two layouts outputs are compared where both recorded as many elements
            of a part: a layout that splits or replaces parts records others.
    """
    for kind in KINDS:
        here, there = first.marks.get(kind, {}), second.marks.get(kind, {})
        names = [*here, *(name for name in there if name not in here)]
        if kind == FORWARD and (bound or here.keys() != there.keys()):
            names = [name for name in names if _has_both(here, there, name, counts=bool(bound))]
        whole = max(whole_norm(here), whole_norm(there)) if bound else 0.0
        gaps = {name: _gap(here, there, name, whole) for name in names}
        differing = [
            name
            for name in names
            if gaps[name] > bound or (not bound and _differs(here, there, name))
        ]
        if differing:
            name = differing[-1] if kind == GRADIENTS else differing[0]
            return TensorDifference(
                first.step, kind, name, gaps[name], len(differing), len(names), bound
            )
    return None


def _gap(here: Marks, there: Marks, name: str, whole: float) -> float:
    """Return the estimated distance of a tensor on both sides; inf if they have none in common."""
    if not _has_both(here, there, name):
        return math.inf
    return relative_gap(here[name], there[name], whole) if _differs(here, there, name) else 0.0


def _has_both(here: Marks, there: Marks, name: str, *, counts: bool = False) -> bool:
    if name not in here or name not in there or here[name].shape != there[name].shape:
        return False
    return not counts or here[name].count == there[name].count


def _differs(here: Marks, there: Marks, name: str) -> bool:
    return not _has_both(here, there, name) or here[name].digest != there[name].digest


@dataclass(frozen=True)
class StatisticDifference:
    """The first number of two lines of statistics.jsonl that differs, of one tensor.

    Attributes:
        step, kind, name: kind is a key of the line, name a parameter or a block.
        values: the two numbers; None where a line has none.
        differing, compared: numbers of this kind that differ, and all of them.
    """

    step: int
    kind: str
    name: str
    values: tuple[object, object]
    differing: int
    compared: int


STATISTICS = (
    "weight_norm", "activation_rms", "activation_largest", "gradient_norm", "update_ratio"
)  # fmt: skip
"""Keys of a line of statistics.jsonl, in the order in which a step computes them."""


def find_statistic_difference(
    first: Mapping[int, Record], second: Mapping[int, Record]
) -> StatisticDifference | None:
    """Return a tensor's first number that differs in bits, over the steps of both runs.

    Gradients are computed from the last part to the first, so they are compared backward.
    """
    for step in sorted(first.keys() & second.keys()):
        for kind in STATISTICS:
            here, there = first[step].get(kind), second[step].get(kind)
            if not isinstance(here, dict) or not isinstance(there, dict):
                continue
            names = [name for name in here if name in there]
            differing = [name for name in names if here[name] != there[name]]
            if differing:
                name = differing[-1] if kind == "gradient_norm" else differing[0]
                values = here[name], there[name]
                return StatisticDifference(step, kind, name, values, len(differing), len(names))
    return None
