"""Predicted seconds of one optimizer step: calibrated terms, overlap, and the pipeline bubble.

    stage   τ = (device^k + host^k)^(1/k): kernels run while the host launches the next ones, so the
            longer of the two counts (k = 8: a smooth maximum); on a CPU they add (k = 1)
    step    m·τ_max + bubble + gradients + parameters + optimizer + offload + constant
    bubble  pipeline_bubble.py's at the mean τ of the other stages; for 1f1b Σ τ_i − τ_max, so that
            uneven stages (embedding, head, a remainder of blocks) count individually
    hidden  communication K beside compute C costs max(0, K − C), the part that is always exposed
            (first gather, last bucket), and (σ − 1)·min(K, C) for slowing the compute down

Every term's coefficient is the machine's: seconds measured per second of plain arithmetic
(`Calibration.efficiency`), or seconds per event (`constants_s`). The step is homogeneous in them:
it equals Σ effective term · coefficient; `fit.py` solves this for the coefficients.
Sources: Narayanan et al. 2021 (1F1B), torch's FSDP MILP (exposed gathers), Galvatron (contention).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.base.estimates.cluster import Calibration
from shoal.base.estimates.estimate import PlanningCase, TimeEstimate
from shoal.forecast.machines.calibrations import calibration_of
from shoal.forecast.time.step_terms import StageTerms, StepTerms, step_terms
from shoal.planning.pipeline_bubble import bubble_s

SMOOTHNESS = {"cpu": 1.0}
"""Exponent k of a stage's smooth maximum by kind of device; others: 8."""

UNKNOWN_ERROR = 0.3
"""Relative error of a prediction without a measured run."""

CONSTANTS = ("block", "micro_batch", "step")
"""Terms that count events: their coefficients are in `constants_s`."""

SHOWN = {
    "attention": "matrix", "weights": "matrix", "loss": "elementwise", "launch": "constants",
    "block": "constants", "micro_batch": "constants", "step": "constants",
}  # fmt: skip
"""Terms that are reported as part of another."""

WORSE = {"_both": "_across", "_across": "", "_shared": ""}
"""Placement of a group without its own coefficient → the placement whose coefficient it uses."""


def coefficient(calibration: Calibration, term: str) -> float:
    """Return the coefficient of a term; 1 if unknown, or 0 seconds for an unknown event.

    >>> known = Calibration(efficiency={"tensor": 1.5})
    >>> [coefficient(known, term) for term in ("tensor_both", "matrix", "block")]
    [1.5, 1.0, 0.0]
    """
    if term in CONSTANTS:
        return calibration.constants_s.get(term, 0.0)
    found = calibration.efficiency.get(term)
    if found is not None:
        return found
    name, underscore, ending = term.rpartition("_")
    if underscore + ending in WORSE:
        return coefficient(calibration, name + WORSE[underscore + ending])
    return 1.0


class CoefficientTable(dict[str, float]):
    """Coefficients by term, each computed once."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        self.calibration = calibration

    def __missing__(self, term: str) -> float:
        value = coefficient(self.calibration, term)
        self[term] = value
        return value


@dataclass(frozen=True)
class TimedStage:
    """A stage's micro-batch in seconds, with the weights of device and host time in it."""

    stage: StageTerms
    tau_s: float
    device_share: float = 1.0
    host_share: float = 1.0


@dataclass
class ExposedTerms:
    """A step as additive terms: term → exposed seconds before its coefficient.

    Attributes:
        bubble: the part of `terms` in the bubble, by term.
        again: calibrated seconds of recompute.
        hidden: term → calibrated seconds hidden by compute.
    """

    terms: dict[str, float]
    step_s: float = 0.0
    bubble: dict[str, float] = field(default_factory=dict)
    again: float = 0.0
    hidden: dict[str, float] = field(default_factory=dict)


def exposed_terms(terms: StepTerms, table: CoefficientTable) -> ExposedTerms:
    """Return the exposed part of each term, under a machine's coefficients.

    Σ coefficient · effective term = step_s, exactly.
    """
    power = SMOOTHNESS.get(terms.case.cluster.device.kind, 8.0)
    timed = [_time_stage(stage, table, power) for stage in terms.stages]
    slowest = max(timed, key=lambda each: each.tau_s * each.stage.fullest)
    found = ExposedTerms(dict(terms.step), again=slowest.stage.again)
    m = terms.case.accumulate
    _add_stage_terms(found.terms, slowest, m * slowest.stage.fullest)
    if terms.case.layout.pp > 1:
        _add_bubble(terms.case, timed, slowest, found.bubble)
        for term, seconds in found.bubble.items():
            found.terms[term] = found.terms.get(term, 0.0) + seconds
    _add_exposed(terms, slowest, _ExposureCounter(table, found, terms.habits.wait_share))
    found.step_s = sum(table[term] * seconds for term, seconds in found.terms.items())
    return found


def _time_stage(stage: StageTerms, table: CoefficientTable, power: float) -> TimedStage:
    device = sum(table[term] * seconds for term, seconds in stage.device.items())
    host = table["launch"] * stage.launch_s
    if power == 1.0 or device <= 0.0 or host <= 0.0:
        return TimedStage(stage, device + host)
    high = max(device, host)
    tau = high * ((device / high) ** power + (host / high) ** power) ** (1 / power)
    return TimedStage(stage, tau, (device / tau) ** (power - 1), (host / tau) ** (power - 1))


def _add_stage_terms(found: dict[str, float], timed: TimedStage, times: float) -> None:
    """Add a stage's terms, weighted by the device's or the host's share."""
    share = timed.device_share * times
    for term, seconds in timed.stage.device.items():
        found[term] = found.get(term, 0.0) + seconds * share
    host_s = timed.stage.launch_s * timed.host_share * times
    found["launch"] = found.get("launch", 0.0) + host_s


def _add_bubble(
    case: PlanningCase, timed: list[TimedStage], slowest: TimedStage, found: dict[str, float]
) -> None:
    """Add the bubble of the slowest stage: its share of every other stage's micro-batch."""
    stages = case.layout.pp
    forward = slowest.stage.forward
    weights = (1 - slowest.stage.again) / 3
    inputs = 1 - forward - weights
    unit = bubble_s(case.schedule, stages, case.accumulate, forward, inputs, weights, case.chunks)
    for one in timed:
        copies = one.stage.copies - (1 if one is slowest else 0)
        _add_stage_terms(found, one, copies * unit / (stages - 1))


@dataclass(frozen=True)
class _ExposureCounter:
    """Accumulator of exposed communication, and of communication that compute hides."""

    table: CoefficientTable
    found: ExposedTerms
    wait_share: float

    def add(
        self, term: str, raw_s: float, times: float, bare_share: float, beside_s: float
    ) -> None:
        """Add communication of `raw_s`, uncalibrated, beside `beside_s` of compute.

        Args:
            times: per step.
            bare_share: the share of it that compute cannot hide.
        """
        whole = raw_s * self.table[term]
        if whole <= 0.0 or times <= 0:
            return
        covered = min(whole * (1 - bare_share), beside_s)
        gone = covered * (1 - self.wait_share)
        terms, hidden = self.found.terms, self.found.hidden
        terms[term] = terms.get(term, 0.0) + raw_s * times * (1 - gone / whole)
        if gone:
            hidden[term] = hidden.get(term, 0.0) + times * gone


def _add_exposed(terms: StepTerms, slowest: TimedStage, waits: _ExposureCounter) -> None:
    """Add the exposed data-parallel and offload seconds beside the slowest stage's compute."""
    sync, habits, m = terms.sync, terms.habits, terms.case.accumulate
    overlaps = terms.case.cluster.device.kind != "cpu"
    busy_s = slowest.tau_s * slowest.stage.fullest if overlaps else 0.0
    forward_s = busy_s * slowest.stage.forward
    fore = forward_s if habits.hides_parameters else 0.0
    beside = busy_s - forward_s if habits.hides_gradients else 0.0
    sends, gathers = "gradients" + sync.suffix, "parameters" + sync.suffix
    waits.add(gathers, sync.update.seconds, 1, 0.0, fore if habits.hides_update else 0.0)
    waits.add("offload", terms.beside_s / m, m, 0.0, busy_s)
    waits.add(gathers, sync.root.seconds, m, 1.0, 0.0)
    if not sync.blocks:
        waits.add(sends, sync.gradients.seconds, sync.reductions, sync.last_share, beside)
        return
    gather_s, scatter_s = sync.gather.seconds * sync.blocks, sync.scatter.seconds * sync.blocks
    waits.add(gathers, gather_s, m, 1 / sync.blocks, fore)
    # weights precede gradients in the backward pass: the next block cannot start without them
    again_s = sync.again.seconds * sync.blocks
    waits.add(gathers, again_s, m, 0.0, beside)
    left = max(0.0, beside - again_s * waits.table[gathers])
    waits.add(sends, scatter_s, sync.scatters, 1 / sync.blocks, left)
    waits.add(sends, sync.gradients.seconds, sync.reductions, 1.0, 0.0)


def predict_time(case: PlanningCase) -> TimeEstimate:
    """Predict the seconds of one optimizer step on the case's cluster, in named parts that sum up.

    A cluster's own calibration is used if it has a `matrix` term; else its values override those of
    the case's framework or of the kind of device. Of a cluster of unequal parts the slowest counts:
    every step waits for it.

    Returns:
        Parts without those of 0; low_s and high_s by the calibration's error, 30 % if it has none.

    Raises:
        PlanError: unknown number format, schedule, recompute policy or framework.
    """
    cluster = case.cluster
    if cluster.groups:
        parts = [replace(cluster, groups=()), *cluster.groups]
        estimates = [predict_time(replace(case, cluster=part)) for part in parts]
        return max(estimates, key=lambda estimate: estimate.step_s)
    calibration = calibration_of(case)
    table = CoefficientTable(calibration)
    if case.layout.threads > 1 and cluster.device.kind != "cpu":
        from shoal.forecast.time.replica_costs import replica_terms

        terms = replica_terms(case)
    else:
        terms = step_terms(case)
    found = exposed_terms(terms, table)
    off = calibration.time_error or UNKNOWN_ERROR
    estimate = TimeEstimate(
        parts=_reported_parts(found, table),
        step_s=found.step_s,
        hidden=found.hidden,
        bytes=terms.sent,
        low_s=found.step_s / (1 + off),
        high_s=found.step_s * (1 + off),
        model_flops=3 * case.model.forward_flops * case.batch,
    )
    if case.layout.servers:
        from shoal.forecast.time.server_costs import async_step_time

        return async_step_time(case, estimate)
    return estimate


def _reported_parts(found: ExposedTerms, table: CoefficientTable) -> dict[str, float]:
    """Return seconds by reported name, with bubble and recompute separated from the others."""
    shown: dict[str, float] = {}
    bubble = again = 0.0
    for term, seconds in found.terms.items():
        waited = found.bubble.get(term, 0.0)
        own = (seconds - waited) * table[term]
        bubble += waited * table[term]
        if term in ("matrix", "attention", "elementwise"):
            again += own * found.again
            own *= 1 - found.again
        name = term
        for ending in WORSE:
            name = name.removesuffix(ending)
        name = SHOWN.get(name, name)
        shown[name] = shown.get(name, 0.0) + own
    shown |= {"recompute": again, "bubble": bubble}
    return {name: seconds for name, seconds in shown.items() if seconds}
