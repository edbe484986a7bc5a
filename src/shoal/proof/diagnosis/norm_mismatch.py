"""Clues on a wrong gradient norm over right gradients: the norm of each rank, and its error.

The true norm counts every element of the model once. Ranks hold different parts of a sharded model,
and some the same ones, so a norm can leave parts out or count them several times; clipping by it
scales the gradient wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.proof.diagnosis.clue import OURS, Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_sums import is_near
from shoal.proof.trajectory_record import StepRow, TrajectoryRecord
from shoal.proof.verdict import rows_differ

AXES = {
    "pp": "stages",
    "dp_replicate": "replicas",
    "dp_shard": "shards",
    "cp": "context-parallel ranks",
    "tp": "tensor-parallel ranks",
}

LOCAL = "norm of a local shard"
"""Name of a cause."""

ADVICE = (
    f"leave clipping to optimizer.clip if code of your own clips or takes the norm (such as "
    f"clip_grad_norm_ over what one rank holds); if none does, {OURS}"
)


def diagnose_rank_norms(evidence: Evidence) -> Clue | None:
    """Return a clue on a step at which ranks compute different gradient norms."""
    got, expected_rows = evidence.got, evidence.expected.rows
    for number, rows in enumerate(zip(*got.rank_rows, strict=False)):
        norms = [row.grad_norm for row in rows]
        expected = expected_rows[number].grad_norm if number < len(expected_rows) else 0
        if expected is None or None in norms or not _only_norms_differ(rows):
            continue
        squares = math.fsum((n or 0.0) ** 2 for n in norms)
        parts = math.isclose(squares, expected**2, rel_tol=1e-6)
        sums = "; their squares add up to the true norm's" if parts else ""
        told = ", ".join(f"{n:.6g}" for n in norms)
        return Clue(
            LOCAL,
            rows[0].label,
            f"gradient norms at step {rows[0].step} are {told} by rank, {expected:.6g} in one "
            f"process{sums}{_describe_axes(norms, got)}",
            "every rank clips by the norm of what it holds itself; squares must be summed over "
            "all ranks first",
            ADVICE,
        )
    return None


def diagnose_norm(evidence: Evidence, number: int) -> Clue | None:
    """Return a clue on a norm that is wrong on all ranks in row `number`, over right gradients."""
    ours, theirs = evidence.expected.rows[number], evidence.got.rows[number]
    if ours.grad_norm is None or theirs.grad_norm is None:
        return None
    ratio = theirs.grad_norm / ours.grad_norm if ours.grad_norm else math.inf
    if is_near(ratio, 1.0):
        return None
    part = ratio < 1
    return Clue(
        LOCAL if part else "gradient norm",
        theirs.label,
        f"the gradient norm at step {theirs.step} is {theirs.grad_norm:.6g} instead of "
        f"{ours.grad_norm:.6g} ({ratio:.4g} ×) on all ranks, while the gradients before clipping "
        f"are equal",
        "the norm is taken over a part of the elements only, such as what one rank holds"
        if part
        else "elements are counted more than once in the norm, such as what several ranks hold",
        ADVICE,
    )


def _only_norms_differ(rows: tuple[StepRow, ...]) -> bool:
    """Return whether ranks agree on all but the gradient norm."""
    return any(rows_differ(row, rows[0], 1e-9) for row in rows) and all(
        (row.skipped, row.loss) == (rows[0].skipped, rows[0].loss) for row in rows
    )


def _describe_axes(norms: Sequence[float | None], got: TrajectoryRecord) -> str:
    """Return in words the axes along which ranks compute different norms."""
    degrees = got.layout.degrees
    if math.prod(degrees.values()) != len(norms):
        return ""
    differ = []
    for axis, word in AXES.items():
        seen: dict[tuple[int, ...], set[float | None]] = {}
        for rank, norm in enumerate(norms):
            at = got.layout.at(rank)
            seen.setdefault(tuple(at[a] for a in degrees if a != axis), set()).add(norm)
        if any(len(same_place) > 1 for same_place in seen.values()):
            differ.append(word)
    return f" (they differ between {' and between '.join(differ)})" if differ else ""
