"""Names a mistake of our own in how gradients are summed: over ranks, buckets and micro-batches.

A right gradient is the plain sum of what all micro-batches gave. The shares of each in a wrong one
tell what was done to it: nothing of the other ranks (never summed), twice the next one's share (a
sum after every micro-batch), one factor everywhere (divided twice). To a user the product tells
the shares; which of our sums is at fault is told here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_sums import (
    GradientSums,
    common_value,
    find_factor,
    group_values,
    is_near,
)
from shoal.proof.trajectory_record import TrajectoryRecord


def some(names: Sequence[str]) -> str:
    """How many parameters, and the first."""
    return f"{len(names)} parameters (first {names[0]})" if len(names) > 1 else names[0]


def never_summed(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """One rank's own micro-batches and nothing else."""
    values, atoms = evidence.weights, evidence.micro_batch_gradients
    if values is None or atoms is None or atoms.ranks == 1:
        return None
    by_rank = group_values(values, atoms.rank_of, atoms.ranks)
    own = [rank for rank, value in enumerate(by_rank or ()) if not is_near(value, 0.0)]
    if by_rank is None or len(own) != 1 or len(by_rank) == 1:
        return None
    return Clue(
        "missing reduction",
        sums.names[0],
        f"the gradient of {some(sums.names)} at step {sums.step} is {by_rank[own[0]]:.4g} × what "
        f"rank {own[0]} computed itself, with nothing of the other ranks"
        f"{_bucket_text(evidence.got, sums.names)}",
        "it is not summed over ranks: its bucket is not sent, or it is missing in it",
        "see that the reducer has every parameter in a bucket and sends the last one "
        "(data_parallel/buckets.py)",
    )


def _bucket_text(got: TrajectoryRecord, names: Sequence[str]) -> str:
    """Where in the buckets the wrong parameters are, if that says something."""
    if not got.buckets or len(names) > len(got.trainable) / 2:
        return ""
    held = [number for number, bucket in enumerate(got.buckets) if set(names) <= set(bucket)]
    if not held:
        return ""
    number, last = held[0], held[0] == len(got.buckets) - 1
    place = "the last bucket" if last else f"bucket {number + 1} of {len(got.buckets)}"
    whole = set(names) == set(got.buckets[number])
    return f" ({'all' if whole else 'part'} of {place})"


def tie(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """What a tie's names share has a whole multiple of its gradient."""
    tied = evidence.got.tied
    name = sums.names[0]
    factor = find_factor(sums, [name])
    if not set(sums.names) <= set(tied.values()) or factor is None:
        return None
    if not is_near(factor, round(factor)) or round(factor) < 2:
        return None
    return Clue(
        "tie counted twice",
        name,
        f"its gradient at step {sums.step} is {factor:.4g} × that of one process; it is tied to "
        f"{', '.join(second for second, first in tied.items() if first == name)}",
        "a tied weight is summed once under each of its names",
        "see how the reducer lists tied parameters: each once, by its first name",
    )


def whole_scale(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """Every micro-batch has the same wrong share."""
    times = find_factor(sums, sums.names)
    if times is None or is_near(times, 1.0):
        return None
    ranks = evidence.got.layout.data_degree
    seen = f"the gradient of {some(sums.names)} at step {sums.step} is {times:.6g} × that of one"
    if sums.short is not None:
        return Clue(
            "last short window",
            "",
            f"{seen} process; the full steps before it are equal, and this one holds "
            f"{sums.short:.3g} × the targets of the one before",
            "an epoch's short last step is divided by a full step's count (of targets, or of "
            "micro-batches) instead of by its own",
            "see what a step divides by (trainer/step/optimizer_step.py, update)",
        )
    known = {
        float(ranks): f"summed twice over {ranks} ranks, or each rank divides by its own share of "
        f"the targets",
        1 / ranks: f"divided by {ranks} ranks (an average) and by the count of targets as well: a "
        f"factor {ranks} is lost",
    }
    for value, cause in known.items():
        if ranks > 1 and is_near(times, value):
            return Clue(
                "factor of ranks",
                "",
                f"{seen} process, {'1/' if times < 1 else ''}{ranks} for {ranks} ranks",
                cause,
                "see where gradients are divided: does a reducer average?",
            )
    return None


def sync_each(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """Earlier micro-batches of the accumulation weigh more, by the number of ranks per place."""
    values, atoms = evidence.weights, evidence.micro_batch_gradients
    if values is None or atoms is None:
        return None
    places = -(-len(values) // atoms.ranks)
    by_place = group_values(values, lambda i: i // atoms.ranks, places)
    if by_place is None or len(by_place) < 2 or common_value(by_place) is not None:
        return None
    ratios = [a / b for a, b in zip(by_place, by_place[1:], strict=False) if b]
    if not all(is_near(ratio, float(atoms.ranks)) for ratio in ratios):
        return None
    return Clue(
        "sync on every micro-batch",
        "",
        f"at step {sums.step} the micro-batches of a rank weigh "
        f"{' : '.join(f'{v:.4g}' for v in by_place)} in their order: each is {atoms.ranks} × the "
        f"next",
        f"gradients are summed over {atoms.ranks} ranks after every micro-batch, and what was "
        f"summed before is summed again",
        "see when the reducer is armed: in the last backward pass of a step only",
    )
