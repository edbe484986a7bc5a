"""Finds the constants of a machine type from measured steps: non-negative, on relative errors.

Least squares  min Σ w_i·(Σ_j a_ij·x_j / y_i − 1)²,  x ≥ 0: every measurement counts by its
                relative error; a coefficient below zero has no physical meaning
Robust          a row further off than `knee` gets the weight knee / |error| (Huber): grids of
                measured runs contain disturbed ones
Solver          Lawson and Hanson's active set on the normal equations
Sources: Lawson and Hanson 1974 (Solving Least Squares Problems, ch. 23), Huber 1964.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Calibration
from shoal.forecast.time.step_terms import StepTerms
from shoal.forecast.time.step_time import CONSTANTS, CoefficientTable, exposed_terms

Matrix = list[list[float]]


def _solve(matrix: Matrix, right: list[float]) -> list[float]:
    """x of matrix · x = right by elimination with pivots; 0 where a column says nothing."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-14:
            continue
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            if factor:
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        if abs(rows[i][i]) >= 1e-14:
            rest = sum(rows[i][k] * found[k] for k in range(i + 1, n))
            found[i] = (rows[i][n] - rest) / rows[i][i]
    return found


def nnls_normal(gram: Matrix, right: list[float], sweeps: int = 200) -> list[float]:
    """x ≥ 0 that minimises xᵀ·G·x − 2·rᵀ·x; G symmetric, not negative.

    >>> [round(x, 6) for x in nnls_normal([[2.0, 0.0], [0.0, 1.0]], [4.0, -1.0])]
    [2.0, 0.0]
    """
    n = len(right)
    scale = [gram[i][i] ** 0.5 or 1.0 for i in range(n)]
    g = [[gram[i][k] / (scale[i] * scale[k]) for k in range(n)] for i in range(n)]
    r = [right[i] / scale[i] for i in range(n)]
    x, free = [0.0] * n, [False] * n
    for _ in range(sweeps):
        slope = [r[i] - sum(g[i][k] * x[k] for k in range(n)) for i in range(n)]
        best = max(range(n), key=lambda i: -1.0 if free[i] else slope[i])
        if free[best] or slope[best] < 1e-10:
            break
        free[best] = True
        while True:
            kept = [i for i in range(n) if free[i]]
            solved = _solve([[g[i][k] for k in kept] for i in kept], [r[i] for i in kept])
            wanted = dict(zip(kept, solved, strict=True))
            low = [i for i in kept if wanted[i] <= 0]
            if not low:
                break
            step = min(x[i] / (x[i] - wanted[i]) if x[i] > wanted[i] else 0.0 for i in low)
            x = [x[i] + step * (wanted[i] - x[i]) if free[i] else 0.0 for i in range(n)]
            for i in low:
                if x[i] <= 1e-12:
                    free[i], x[i] = False, 0.0
            if not any(free):
                break
        x = [wanted[i] if free[i] else 0.0 for i in range(n)]
    return [x[i] / scale[i] for i in range(n)]


@dataclass(frozen=True)
class Fit:
    """What a fit found: the calibration and the relative errors of its own rows, in their order."""

    calibration: Calibration
    errors: tuple[float, ...]


def fit_steps(
    terms: Sequence[StepTerms],
    seconds: Sequence[float],
    prior: Calibration,
    *,
    knee: float = 0.03,
    trust: float = 45.0,
    rounds: int = 12,
) -> Fit:
    """The coefficients with which the model's steps come nearest to measured ones.

    terms, seconds   measured steps: their terms (`step_terms(case)`) and how long they took
    prior            where to start, and what holds: a coefficient off by as much as its prior
                     costs as much as `trust` rows that are off by the knee, so that what the rows
                     say little of stays where it was
    knee             relative error above which a row counts linearly, not squared
    Errors           PlanError without rows, or for times that are not above 0

    Gauss and Newton: the step is homogeneous in its coefficients, so that the effective terms are
    its derivatives; a round that does not improve is taken again in smaller steps.
    """
    if not terms or len(terms) != len(seconds):
        raise PlanError(f"a fit needs measured steps: got {len(terms)} cases, {len(seconds)} times")
    if min(seconds) <= 0:
        raise PlanError(f"a measured step of {min(seconds):g} s: must be more than 0")
    search = _Search(terms, seconds, prior, knee, trust)
    state = search.at(search.start)
    damping = 0.1
    for _ in range(rounds):
        for _ in range(6):
            found = search.at(search.improved(state, damping))
            if found.loss < state.loss:
                break
            damping *= 5
        else:
            break
        gain = (state.loss - found.loss) / state.loss
        state, damping = found, damping / 5
        if gain < 1e-3:
            break
    return Fit(search.calibration(state.point), tuple(state.errors))


@dataclass(frozen=True)
class _State:
    """One point of the search: coefficients, relative terms of every row, errors, what is lost."""

    point: list[float]
    rows: list[list[float]]
    errors: list[float]
    loss: float


class _Search:
    """The rows of a fit, and how to get from one set of coefficients to a better one."""

    def __init__(
        self,
        terms: Sequence[StepTerms],
        seconds: Sequence[float],
        prior: Calibration,
        knee: float,
        trust: float,
    ) -> None:
        self.terms, self.seconds, self.knee, self.prior = terms, seconds, knee, prior
        table = CoefficientTable(prior)
        names = {name for each in terms for name in exposed_terms(each, table).terms}
        self.names = sorted(name for name in names if table[name] > 0)
        self.start = [table[name] for name in self.names]
        self.hold = trust * knee**2

    def calibration(self, point: Sequence[float]) -> Calibration:
        """These coefficients as a calibration; what was not fitted stays the prior's."""
        efficiency, constants = dict(self.prior.efficiency), dict(self.prior.constants_s)
        for name, value in zip(self.names, point, strict=True):
            (constants if name in CONSTANTS else efficiency)[name] = value
        return replace(self.prior, efficiency=efficiency, constants_s=constants)

    def at(self, point: list[float]) -> _State:
        """The rows as these coefficients see them."""
        table = CoefficientTable(self.calibration(point))
        rows, errors = [], []
        loss = 0.0
        for each, seconds in zip(self.terms, self.seconds, strict=True):
            found = exposed_terms(each, table)
            rows.append([found.terms.get(name, 0.0) / seconds for name in self.names])
            error = found.step_s / seconds - 1
            errors.append(error)
            far = abs(error)
            loss += far * far / 2 if far < self.knee else self.knee * (far - self.knee / 2)
        away = sum(((x - s) / s) ** 2 for x, s in zip(point, self.start, strict=True))
        return _State(point, rows, errors, loss + self.hold * away / 2)

    def improved(self, state: _State, damping: float) -> list[float]:
        """The minimum of the quadratic that the rows make at this point; damped towards it."""
        n = len(self.names)
        gram: Matrix = [[0.0] * n for _ in range(n)]
        right = [0.0] * n
        for row, error in zip(state.rows, state.errors, strict=True):
            weight = min(1.0, self.knee / abs(error)) if error else 1.0
            wanted = sum(a * x for a, x in zip(row, state.point, strict=True)) - error
            used = [i for i in range(n) if row[i]]
            for i in used:
                scaled = row[i] * weight
                right[i] += scaled * wanted
                line = gram[i]
                for k in used:
                    line[k] += scaled * row[k]
        for i, (x, start) in enumerate(zip(state.point, self.start, strict=True)):
            near = damping * len(self.terms) * 1e-3 / max(x, 0.1 * start) ** 2
            held = self.hold / start**2
            gram[i][i] += near + held
            right[i] += near * x + held * start
        return nnls_normal(gram, right)
