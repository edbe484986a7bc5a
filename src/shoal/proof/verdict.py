"""Two records side by side: is every number equal, and if not, which is the first that differs?

Differences are norms of differences over the norm of the whole: of the whole gradient for losses,
gradient norms and gradients, of all weights for weights. A number that is not finite on one side
only is infinitely far away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from shoal.proof.bounds import Bounds
from shoal.proof.trajectory_record import Record, Row, Tensors


@dataclass(frozen=True)
class Difference:
    """One thing that is not equal.

    what   "targets", "loss", "used", "gradient", "gradient norm", "skipped", "weights", "buffer",
           "ranks", "steps" · name  the tensor, or the run's label · size  as a share; inf if it
           has none · row  index of the step's row, −1 after the last step
    """

    what: str
    name: str
    size: float
    bound: float
    row: int


@dataclass(frozen=True)
class Parameter:
    """How far one parameter's gradients and final weights are from those of one process.

    gradient   largest difference over all judged steps, as a share of the whole gradient's norm
    step       where that was, from 1 · weights  share of the whole weights' norm
    """

    name: str
    shape: tuple[int, ...]
    gradient: float
    step: int
    weights: float
    equal: bool


@dataclass
class Comparison:
    """The outcome for one trajectory: every parameter, and all differences in order of time."""

    parameters: list[Parameter] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    largest_loss: float = 0.0
    largest_norm: float = 0.0

    @property
    def equal(self) -> bool:
        """Nothing differs by more than its bound."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The earliest difference."""
        return self.differences[0] if self.differences else None


def compare(expected: Record, got: Record, bounds: Bounds) -> Comparison:
    """Hold what a layout computed against what one process computed."""
    found = Comparison()
    worst: dict[str, tuple[float, int]] = {}
    if len(expected.rows) != len(got.rows):
        found.differences.append(Difference("steps", "", math.inf, 0.0, 0))
    for number, (ours, theirs) in enumerate(zip(expected.rows, got.rows, strict=False)):
        gradients = expected.gradients[number], got.gradients[number]
        scale = whole_norm(gradients[0])
        _compare_row(found, number, ours, theirs, scale, bounds.of_step(ours.step))
        _compare_gradients(found, number, ours.step, *gradients, scale, bounds, worst)
    _compare_ranks(found, got, bounds)
    _compare_end(found, expected, got, bounds)
    found.differences.sort(key=lambda d: d.row if d.row >= 0 else len(expected.rows))
    wrong = {d.name for d in found.differences if d.what in ("gradient", "used", "weights")}
    whole = whole_norm(expected.weights)
    for name in [*expected.trainable, *expected.frozen]:
        size, step = worst.get(name, (0.0, 1))
        moved = share(expected.weights[name], got.weights.get(name), whole)
        shape = tuple(expected.weights[name].shape)
        found.parameters.append(Parameter(name, shape, size, step, moved, name not in wrong))
    return found


def apart(ours: Row, theirs: Row, bound: float) -> bool:
    """Whether two ranks tell one step differently."""
    if (ours.step, ours.targets, ours.skipped) != (theirs.step, theirs.targets, theirs.skipped):
        return True
    pairs = ((ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm))
    return any(_number(a, b, 0.0) > bound for a, b in pairs)


def whole_norm(tensors: Tensors) -> float:
    """Euclidean norm over all floating-point tensors."""
    norms = [
        torch.linalg.vector_norm(t.double()) for t in tensors.values() if t.is_floating_point()
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def share(ours: torch.Tensor, theirs: torch.Tensor | None, whole: float) -> float:
    """Norm of the difference over `whole`; infinite where it is not a number."""
    if theirs is None or ours.shape != theirs.shape:
        return math.inf
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    return _ratio(float(torch.linalg.vector_norm(ours.double() - theirs.double())), whole)


def _ratio(difference: float, whole: float) -> float:
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) else math.inf


def _number(ours: float | None, theirs: float | None, scale: float) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return _ratio(abs(ours - theirs), max(abs(ours), scale))


def _compare_row(
    found: Comparison, number: int, ours: Row, theirs: Row, scale: float, bound: float
) -> None:
    told = found.differences
    if ours.label != theirs.label or ours.step != theirs.step:
        told.append(Difference("steps", ours.label, math.inf, 0.0, number))
        return
    if ours.skipped != theirs.skipped:
        told.append(Difference("skipped", ours.label, math.inf, 0.0, number))
    if _number(ours.targets, theirs.targets, 0.0) > bound:
        size = _number(ours.targets, theirs.targets, 0.0)
        told.append(Difference("targets", ours.label, size, bound, number))
    loss = _number(ours.loss, theirs.loss, scale)
    norm = _number(ours.grad_norm, theirs.grad_norm, scale)
    for what, size in (("loss", loss), ("gradient norm", norm)):
        if not size <= bound:
            told.append(Difference(what, ours.label, size, bound, number))
    if bound < math.inf:
        found.largest_loss = max(found.largest_loss, loss)
        found.largest_norm = max(found.largest_norm, norm)


def _compare_gradients(
    found: Comparison,
    number: int,
    step: int,
    ours: Tensors,
    theirs: Tensors,
    scale: float,
    bounds: Bounds,
    worst: dict[str, tuple[float, int]],
) -> None:
    bound = bounds.of_step(step)
    for name in [*ours, *(n for n in theirs if n not in ours)]:
        if name not in ours or name not in theirs:
            worst[name] = (math.inf, step)
            found.differences.append(Difference("used", name, math.inf, bound, number))
            continue
        size = share(ours[name], theirs[name], scale)
        if bound < math.inf and size >= worst.get(name, (-1.0, 0))[0]:
            worst[name] = (size, step)
        if not size <= bound:
            found.differences.append(Difference("gradient", name, size, bound, number))


def _compare_ranks(found: Comparison, got: Record, bounds: Bounds) -> None:
    """Decisions and numbers that ranks disagree about, and tensors in which they ended apart."""
    for number, rows in enumerate(zip(*got.rank_rows, strict=False)):
        if any(apart(row, rows[0], bounds.first) for row in rows):
            found.differences.append(Difference("ranks", rows[0].label, math.inf, 0.0, number))
            break
    for name in got.drift:
        found.differences.append(Difference("ranks", name, math.inf, 0.0, -1))


def _compare_end(found: Comparison, expected: Record, got: Record, bounds: Bounds) -> None:
    whole = whole_norm(expected.weights)
    for name, tensor in expected.weights.items():
        size = share(tensor, got.weights.get(name), whole)
        if not size <= bounds.weights:
            found.differences.append(Difference("weights", name, size, bounds.weights, -1))
    for name, tensor in expected.buffers.items():
        size = share(tensor, got.buffers.get(name), max(1.0, whole_norm({name: tensor})))
        if not size <= bounds.buffers:
            found.differences.append(Difference("buffer", name, size, bounds.buffers, -1))
