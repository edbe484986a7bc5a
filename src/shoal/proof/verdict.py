"""Compare two records: is every number equal, and if not, which is the first that differs?

Differences are norms of differences over the norm of the whole: of the whole gradient for losses,
gradient norms and gradients, of all weights for weights. A number that is not finite on one side
only is infinitely far away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from shoal.proof.distances import TensorDistances, number_distance
from shoal.proof.equality_bounds import EqualityBounds
from shoal.proof.trajectory_record import StepRow, TrajectoryRecord

GRADIENTS = ("gradient", "used", "gradient norm")
"""Differences that mean a wrong gradient."""


@dataclass(frozen=True)
class ProofDifference:
    """One number or tensor that is not equal.

    Attributes:
        what: "targets", "loss", "used", "gradient", "gradient norm", "skipped", "weights",
            "buffer", "ranks", "steps".
        name: the tensor, or the run's label.
        size: as a share; inf if it has none.
        row: index of the step's row, −1 after the last step.
    """

    what: str
    name: str
    size: float
    bound: float
    row: int


@dataclass(frozen=True)
class ParameterDistance:
    """Distance of one parameter's gradients and final weights from those of one process.

    Attributes:
        gradient: largest difference over all judged steps, as a share of the whole gradient's norm.
        step: of that difference, from 1.
        weights: share of the whole weights' norm.
    """

    name: str
    shape: tuple[int, ...]
    gradient: float
    step: int
    weights: float
    equal: bool


@dataclass
class RecordComparison:
    """Outcome for one trajectory: every parameter, and all differences in order of time."""

    parameters: list[ParameterDistance] = field(default_factory=list)
    differences: list[ProofDifference] = field(default_factory=list)
    largest_loss: float = 0.0
    largest_norm: float = 0.0

    @property
    def equal(self) -> bool:
        """Return whether no number differs by more than its bound."""
        return not self.differences

    @property
    def first(self) -> ProofDifference | None:
        """Earliest difference, or None."""
        return self.differences[0] if self.differences else None


def compare_records(
    expected: TrajectoryRecord, got: TrajectoryRecord, bounds: EqualityBounds
) -> RecordComparison:
    """Compare a layout's record with one process's."""
    found, far = RecordComparison(), got.far or measure_distances(expected, got)
    worst: dict[str, tuple[float, int]] = {}
    if len(expected.rows) != len(got.rows):
        found.differences.append(ProofDifference("steps", "", math.inf, 0.0, 0))
    for number, (ours, theirs) in enumerate(zip(expected.rows, got.rows, strict=False)):
        _compare_row(found, number, ours, theirs, far.scales[number], bounds.of_step(ours.step))
        _compare_gradients(found, number, ours.step, far.rows[number], bounds, worst)
    _compare_ranks(found, got, bounds)
    _compare_end(found, far, bounds)
    found.differences.sort(key=lambda d: d.row if d.row >= 0 else len(expected.rows))
    wrong = {d.name for d in found.differences if d.what in ("gradient", "used", "weights")}
    for name in [*expected.trainable, *expected.frozen]:
        size, step = worst.get(name, (0.0, 1))
        moved, shape = far.weights[name], far.shapes[name]
        found.parameters.append(
            ParameterDistance(name, shape, size, step, moved, name not in wrong)
        )
    return found


def measure_distances(expected: TrajectoryRecord, got: TrajectoryRecord) -> TensorDistances:
    """Return the distances of a record with whole tensors from another one."""
    found = TensorDistances()
    for ours, theirs in zip(expected.gradients, got.gradients, strict=False):
        found.add_row(ours, theirs.items())
    ended = chain(got.weights.items(), got.buffers.items())
    found.end(expected.weights, expected.buffers, ended)
    return found


def gradient_differs(
    expected: TrajectoryRecord, got: TrajectoryRecord, number: int, bounds: EqualityBounds
) -> bool:
    """Return whether row `number`, just compared, has a wrong gradient or gradient norm."""
    found, far = RecordComparison(), got.far or TensorDistances()
    ours, theirs = expected.rows[number], got.rows[number]
    _compare_row(found, number, ours, theirs, far.scales[number], bounds.of_step(ours.step))
    _compare_gradients(found, number, ours.step, far.rows[number], bounds, {})
    return any(d.what in GRADIENTS for d in found.differences)


def rows_differ(ours: StepRow, theirs: StepRow, bound: float) -> bool:
    """Return whether two ranks report one step differently."""
    if (ours.step, ours.targets, ours.skipped) != (theirs.step, theirs.targets, theirs.skipped):
        return True
    pairs = ((ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm))
    return any(number_distance(a, b, 0.0) > bound for a, b in pairs)


def _compare_row(
    found: RecordComparison, number: int, ours: StepRow, theirs: StepRow, scale: float, bound: float
) -> None:
    told = found.differences
    if ours.label != theirs.label or ours.step != theirs.step:
        told.append(ProofDifference("steps", ours.label, math.inf, 0.0, number))
        return
    if ours.skipped != theirs.skipped:
        told.append(ProofDifference("skipped", ours.label, math.inf, 0.0, number))
    if number_distance(ours.targets, theirs.targets, 0.0) > bound:
        size = number_distance(ours.targets, theirs.targets, 0.0)
        told.append(ProofDifference("targets", ours.label, size, bound, number))
    loss = number_distance(ours.loss, theirs.loss, scale)
    norm = number_distance(ours.grad_norm, theirs.grad_norm, scale)
    for what, size in (("loss", loss), ("gradient norm", norm)):
        if not size <= bound:
            told.append(ProofDifference(what, ours.label, size, bound, number))
    if bound < math.inf:
        found.largest_loss = max(found.largest_loss, loss)
        found.largest_norm = max(found.largest_norm, norm)


def _compare_gradients(
    found: RecordComparison,
    number: int,
    step: int,
    far: Mapping[str, tuple[float, bool]],
    bounds: EqualityBounds,
    worst: dict[str, tuple[float, int]],
) -> None:
    bound = bounds.of_step(step)
    for name, (size, both) in far.items():
        if not both:
            worst[name] = (math.inf, step)
            found.differences.append(ProofDifference("used", name, math.inf, bound, number))
            continue
        if bound < math.inf and size >= worst.get(name, (-1.0, 0))[0]:
            worst[name] = (size, step)
        if not size <= bound:
            found.differences.append(ProofDifference("gradient", name, size, bound, number))


def _compare_ranks(found: RecordComparison, got: TrajectoryRecord, bounds: EqualityBounds) -> None:
    """Add decisions and numbers that ranks disagree about, and final tensors that differ."""
    for number, rows in enumerate(zip(*got.rank_rows, strict=False)):
        if any(rows_differ(row, rows[0], bounds.first) for row in rows):
            found.differences.append(ProofDifference("ranks", rows[0].label, math.inf, 0.0, number))
            break
    for name in got.drift:
        found.differences.append(ProofDifference("ranks", name, math.inf, 0.0, -1))


def _compare_end(found: RecordComparison, far: TensorDistances, bounds: EqualityBounds) -> None:
    for what, sizes, bound in (
        ("weights", far.weights, bounds.weights),
        ("buffer", far.buffers, bounds.buffers),
    ):
        for name, size in sizes.items():
            if not size <= bound:
                found.differences.append(ProofDifference(what, name, size, bound, -1))
