"""One step's gradients, comparable: with clipping and the division by the count of targets undone.

Clipping hides scales, so it is undone first: the gradient that the optimizer saw is divided by
the coefficient of this layout's own gradient norm, and multiplied by the true count of
targets. A right one is then the plain sum of the micro-batches' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shoal.proof.diagnosis.micro_batch_gradients import (
    GradientShares,
    MicroBatchGradients,
    solve_shares,
)
from shoal.proof.distances import norm_over
from shoal.proof.equality_bounds import SUM_EPSILON
from shoal.proof.ownership_mismatch import OwnershipMismatch
from shoal.proof.tensor_spill import ScaledTensors, Tensors
from shoal.proof.trajectory_record import TrajectoryRecord

TOLERANCE = 1e-4
"""Shares nearer than this are equal: solving for them loses digits, mistakes are far larger."""

DIGITS = 1e-11
"""As the bound on float64 gradients, with room for dividing by clipping's coefficients."""


@dataclass(frozen=True)
class GradientSums:
    """One step's gradients of loss sums, with clipping undone.

    Attributes:
        right, wrong: of one process and of the layout.
        names: parameters that differ, in the module's order.
        short: the step is the first that differs and has fewer samples than the ones before it.
        loss_right: the loss of the step is that of one process.
        apart: parameters whose holders disagree: the sum over holders, with clipping undone.
    """

    right: Tensors
    wrong: Tensors
    names: tuple[str, ...]
    step: int
    short: float | None
    loss_right: bool = True
    apart: dict[str, OwnershipMismatch] = field(default_factory=dict)


def clip_coefficient(norm: float | None, clip: float) -> float:
    """Return the factor by which clipping multiplied the mean gradient."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 and norm is not None else 1.0


def undo_clipping(expected: TrajectoryRecord, got: TrajectoryRecord, number: int) -> GradientSums:
    """Return the gradient sums of both sides at row `number`, with clipping and mean undone.

    Parameters unused on one side are zero there.
    """
    mine, given = expected.gradients[number], got.gradients[number]
    right = ScaledTensors(mine, _unclip_factor(expected, number), given)
    wrong = ScaledTensors(given, _unclip_factor(got, number), mine)
    whole = norm_over(right.values())
    exact = all(g.dtype == torch.float64 for g in expected.gradients[number].values())
    noise = whole * (DIGITS if exact else SUM_EPSILON)
    differ = [n for n in right if not norm_of(right[n] - wrong[n]) <= noise]
    far = [n for n in expected.trainable if n in differ]
    label = expected.rows[number].label
    earlier = [r.targets for r in expected.rows[:number] if r.label == label]
    row, theirs = expected.rows[number], got.rows[number]
    count = row.targets
    short = count / earlier[-1] if earlier and count < 0.7 * min(earlier) else None
    losses = (row.loss or 0.0) * count, (theirs.loss or 0.0) * theirs.targets
    loss_right = abs(losses[0] - losses[1]) <= max(noise, abs(losses[0]) * noise / (whole or 1.0))
    apart = {
        name: replace(one, total=one.total.double() * _unclip_factor(got, number))
        for name, one in (got.apart[number] if got.apart else {}).items()
    }
    return GradientSums(right, wrong, tuple(far), row.step, short, loss_right, apart)


def _unclip_factor(side: TrajectoryRecord, number: int) -> float:
    """Return the factor that turns a step's clipped mean gradient into the sum over targets.

    Args:
        side: record of one process, or of the layout.
        number: row of the step in the record.

    Returns:
        the step's number of targets / its clipping coefficient.
    """
    row = side.rows[number]
    return row.targets / clip_coefficient(row.grad_norm, side.clip)


def norm_of(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm."""
    return float(torch.linalg.vector_norm(tensor))


def solve_micro_batch_shares(
    sums: GradientSums, atoms: MicroBatchGradients | None
) -> GradientShares | None:
    """Solve for the factor of each micro-batch's gradient in the layout's wrong sum.

    If the micro-batches' gradients are too similar, one factor per rank is solved.

    Args:
        sums: the right and the wrong gradients of the step.
        atoms: right gradient of each micro-batch; None: unknown.

    Returns:
        factors and residual, which may be large (`accept_shares`); None without atoms.
    """
    if atoms is None or not atoms.gradients:
        return None
    solved = solve_shares(sums.wrong, atoms, sums.names)
    if solved.values is None or solved.residual > TOLERANCE:
        by_rank = solve_shares(sums.wrong, atoms.by_rank(), sums.names)
        if by_rank.values is not None and by_rank.residual <= TOLERANCE:
            count = len(atoms.gradients)
            return GradientShares(
                tuple(by_rank.values[i % atoms.ranks] for i in range(count)), by_rank.residual
            )
    return solved


def accept_shares(solved: GradientShares | None) -> tuple[float, ...] | None:
    """Return the factors by micro-batch, or None if their residual exceeds TOLERANCE."""
    if solved is None or solved.values is None or solved.residual > TOLERANCE:
        return None
    return solved.values


def is_near(value: float, wanted: float) -> bool:
    """Return True if two solved factors are equal within TOLERANCE."""
    return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def common_value(values: Sequence[float]) -> float | None:
    """Return the value that all share, NaN left out; None if there are several."""
    known = [v for v in values if not math.isnan(v)]
    return known[0] if known and all(is_near(v, known[0]) for v in known) else None


def group_values(
    values: Sequence[float], of: Callable[[int], int], count: int
) -> tuple[float, ...] | None:
    """Return the value of each group of micro-batches if each group has one; else None."""
    found = []
    for group in range(count):
        members = [v for i, v in enumerate(values) if of(i) == group and not math.isnan(v)]
        if not members:
            continue
        value = common_value(members)
        if value is None:
            return None
        found.append(value)
    return tuple(found)


def find_factor(sums: GradientSums, names: Sequence[str]) -> float | None:
    """Return f if the wrong gradients are f times the right ones, else None."""
    dot = math.fsum(float((sums.wrong[n] * sums.right[n]).sum()) for n in names)
    square = math.fsum(norm_of(sums.right[n]) ** 2 for n in names)
    if not square or not math.isfinite(dot):
        return None
    factor = dot / square
    left = math.fsum(norm_of(sums.wrong[n] - factor * sums.right[n]) ** 2 for n in names)
    return factor if left <= (TOLERANCE * factor) ** 2 * square else None
