"""Names a mistake of our own in a gradient norm: which parts were counted, and how often?

The true norm counts every element of the model once. Ranks hold different parts under tensor and
pipeline parallelism, and some the same ones, so a norm can leave parts out (those of other ranks,
of another mesh) or count them several times (whatever several ranks hold). What each such mistake
gives is known from the gradients of one process, and is held against the layout's norm. To a user
the product says only that the norm is too large or too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_sums import clip_coefficient, is_near, norm_of
from shoal.proof.trajectory_record import TrajectoryRecord


def norm_of_parts(evidence: Evidence) -> Clue | None:
    """Gradients agree, the norm does not: what else was counted?"""
    number, expected, got = evidence.number, evidence.expected, evidence.got
    if number is None or evidence.sums.names or not got.held:
        return None
    ours, theirs = expected.rows[number], got.rows[number]
    if not ours.grad_norm or not theirs.grad_norm:
        return None
    scale = clip_coefficient(ours.grad_norm, expected.clip)
    squares = {n: (norm_of(g) / scale) ** 2 for n, g in expected.gradients[number].items()}
    near_ones = []
    for counts, name, cause in _countings(got):
        wrong = math.sqrt(math.fsum(counts.get(n, 0) * square for n, square in squares.items()))
        if is_near(wrong / theirs.grad_norm, 1.0) and not is_near(wrong / ours.grad_norm, 1.0):
            near_ones.append((abs(wrong - theirs.grad_norm), name, cause))
    if not near_ones:
        return None
    _, name, cause = min(near_ones, key=lambda found: found[0])
    return Clue(
        name,
        theirs.label,
        f"the gradient norm at step {theirs.step} is {theirs.grad_norm:.6g} instead of "
        f"{ours.grad_norm:.6g}, as if {cause}; the gradients before clipping are equal",
        "the norm must count every element of the model once: over all meshes, each holder's share "
        "divided by the number of holders",
        "see the squares of a step (trainer/step/optimizer_step.py, _squares) and Placement.copies_of_sum",
    )


def _countings(got: TrajectoryRecord) -> Iterator[tuple[dict[str, float], str, str]]:
    """Wrong ways to count: how often each parameter, the name of the mistake, what is counted."""
    held = got.held
    often = {name: float(one.copies_in_model(got.layout)) for name, one in held.items()}
    ties = {name: float(len(one.stages)) for name, one in held.items()}
    within = {name: often[name] / ties[name] for name in held}
    twice, part = "norm counts replicas", "norm over one mesh"
    yield ties, twice, "weights that several stages hold were counted by each"
    yield within, twice, "what tensor-parallel ranks hold whole was counted by each"
    yield often, twice, "every holder of a parameter counted it as its own"
    for stage in sorted({s for one in held.values() for s in one.stages}):
        own = {n: float(stage in one.stages) for n, one in held.items()}
        shares = {n: count / ties[n] for n, count in own.items()}
        for counts in (own, shares):
            yield counts, part, f"there were the parameters of stage {stage} only"
    cut = {n: float(one.tp_cut is not None) for n, one in held.items()}
    yield cut, part, "there were only parameters that tensor-parallel ranks hold in parts"
    whole = {n: 1 - count for n, count in cut.items()}
    yield whole, part, "there were only parameters that tensor-parallel ranks hold whole"
    once = {n: float(one.copies_in_model(got.layout) == 1) for n, one in held.items()}
    yield once, part, "parameters with several holders were not counted at all"
