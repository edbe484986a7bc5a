"""From a difference to its likely cause: one line on what was seen, what it means, where to look.

Causes are tried in the order in which they explain each other: a weight that should not move, or
ranks that decide differently, make all later gradients wrong, so they are looked at first; then the
first wrong gradient is taken apart (micro_batch_gradients.py); what is left is told as it was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.proof.clue import Clue
from shoal.proof.divided import AXES, DROPPED
from shoal.proof.micro_batch_gradients import Atoms
from shoal.proof.norms import norms_along
from shoal.proof.trajectory_record import Record, Row
from shoal.proof.verdict import Comparison, apart
from shoal.proof.wrong_gradients import Forward, wrong_gradient

UNMOVED_SHARE = 0.02
"""From this share of elements that stay where they should move, a slice is called stale."""


@dataclass(frozen=True)
class Case:
    """All that is known about a trajectory that is not equal."""

    expected: Record
    got: Record
    comparison: Comparison
    atoms: Atoms | None
    forward: Forward | None = None


def explain(
    expected: Record,
    got: Record,
    comparison: Comparison,
    atoms: Atoms | None = None,
    forward: Forward | None = None,
) -> Clue:
    """The likely cause of the first difference.

    atoms     of the step of the first wrong gradient; without them the shares stay unknown
    forward   names further mistakes of a forward pass
    """
    case = Case(expected, got, comparison, atoms, forward)
    for look in LOOKS:
        clue = look(case)
        if clue is not None:
            return clue
    return _as_seen(case)


def _frozen_moved(case: Case) -> Clue | None:
    for name in case.got.frozen:
        if not torch.equal(case.got.start[name], case.got.weights[name]):
            return Clue(
                "frozen parameter moved",
                name,
                "it does not train, yet it ended other than it began",
                "an optimizer, weight decay or a flat buffer covers parameters that are frozen",
                "which parameters the optimizer's groups and the buckets hold",
            )
    return None


def _decisions_differ(case: Case) -> Clue | None:
    for rows in zip(*case.got.rank_rows, strict=False):
        skipped = [rank for rank, row in enumerate(rows) if row.skipped]
        if skipped and len(skipped) < len(rows):
            return Clue(
                "decision on one rank",
                rows[0].label,
                f"step {rows[0].step} was skipped by {_ranks(skipped)} of {len(rows)} only",
                "each rank decides by its own numbers whether to step (overflow, loss scale, a "
                "non-finite gradient); the flag must be all-reduced first",
                "the loss scaler and the skip decision in trainer/step.py",
            )
    return None


def _norms_differ(case: Case) -> Clue | None:
    """Ranks tell different gradient norms: each clips by what it holds."""
    for number, rows in enumerate(zip(*case.got.rank_rows, strict=False)):
        norms = [row.grad_norm for row in rows]
        expected = case.expected.rows[number].grad_norm if number < len(case.expected.rows) else 0
        if expected is None or None in norms or not apart_norms(rows):
            continue
        squares = math.fsum((n or 0.0) ** 2 for n in norms)
        parts = math.isclose(squares, expected**2, rel_tol=1e-6)
        sums = "; their squares add up to the true norm's" if parts else ""
        told = ", ".join(f"{n:.6g}" for n in norms)
        return Clue(
            "norm of a local shard",
            rows[0].label,
            f"gradient norms at step {rows[0].step} are {told} by rank, {expected:.6g} in one "
            f"process{sums}{norms_along(norms, case.got)}",
            "every rank clips by the norm of what it holds itself; squares must be summed over "
            "all ranks first",
            "the gradient norm in trainer/step.py (update)",
        )
    return None


def apart_norms(rows: tuple[Row, ...]) -> bool:
    """Whether ranks agree on all but the gradient norm."""
    return any(apart(row, rows[0], 1e-9) for row in rows) and all(
        (row.skipped, row.loss) == (rows[0].skipped, rows[0].loss) for row in rows
    )


def _nothing_moves(case: Case) -> Clue | None:
    trained = [n for n in case.got.trainable if _moves(case, n)]
    still = [n for n in trained if torch.equal(case.got.start[n], case.got.weights[n])]
    if not still:
        return None
    if len(still) == len(trained):
        return Clue(
            "optimizer over other tensors",
            still[0],
            f"all {len(still)} parameters that should move end exactly where they began",
            "the optimizer steps over other tensors than the model's: it was built before the "
            "weights were sharded, cast or moved",
            "where the optimizer is built: after parallelize, or as a function params -> optimizer",
        )
    return Clue(
        "parameter not stepped",
        still[0],
        f"{len(still)} of {len(trained)} parameters that should move end exactly where they began",
        "the optimizer's groups lack them, or its step over them is never written back",
        "the optimizer's parameter groups; what is published after the step",
    )


def _stale(case: Case) -> Clue | None:
    for name in case.got.trainable:
        start, ended = case.got.start[name], case.got.weights[name]
        should = case.expected.weights[name] != case.expected.start[name]
        stays = (ended == start) & should
        count, all_ = int(stays.sum()), int(should.sum())
        apart = name in case.got.drift  # a whole parameter that only other ranks see moving
        if all_ and count / all_ >= UNMOVED_SHARE and (count < all_ or apart):
            return Clue(
                "stale shard",
                name,
                f"{count} of {all_} elements that should move are still as they were at the start",
                "a slice that another rank owns is not gathered after its step",
                "what is published after the optimizer's step (all-gather of weights)",
            )
    return None


def _buffers_drift(case: Case) -> Clue | None:
    buffers = [n for n in case.got.drift if n in case.got.buffers]
    if not buffers or len(buffers) < len(case.got.drift):
        return None
    running = "running_" in buffers[0]
    return Clue(
        "BatchNorm drift" if running else "buffer drift",
        buffers[0],
        f"{len(buffers)} buffer{'s' if len(buffers) > 1 else ''} ended differently on each rank, "
        f"all parameters equal",
        "running statistics move by each rank's own micro-batches only"
        if running
        else "the forward pass writes a buffer from this rank's samples",
        "parallel/batch_norm.py" if running else "parallel/sync_buffers.py",
    )


def _gradient(case: Case) -> Clue | None:
    first = case.comparison.first
    wrong = [d for d in case.comparison.differences if d.what in ("gradient", "used")]
    rows = [d.row for d in case.comparison.differences if d.what == "gradient norm"]
    numbers = [d.row for d in wrong] + rows
    if first is None or not numbers:
        return None
    return wrong_gradient(case.expected, case.got, case.atoms, min(numbers), case.forward)


def _targets(case: Case) -> Clue | None:
    for found in case.comparison.differences:
        if found.what == "targets":
            ours, theirs = case.expected.rows[found.row], case.got.rows[found.row]
            clue = _gradient(case) if case.got.layout.pp > 1 else None
            if clue is not None and clue.name == DROPPED:
                return clue
            for axis, ranks in AXES.items():
                degree = case.got.layout.degrees[axis]
                if degree > 1 and math.isclose(theirs.targets, ours.targets * degree):
                    return Clue(
                        "count of targets",
                        found.name,
                        f"step {ours.step} counted {theirs.targets:g} targets, {degree} × the "
                        f"{ours.targets:g} of one process; there are {degree} {ranks}",
                        f"each of the {ranks} tells the loss and the count of them all",
                        "which rank's loss counts (Program.speaks)",
                    )
            return Clue(
                "count of targets",
                found.name,
                f"step {ours.step} counted {theirs.targets:g} targets, one process "
                f"{ours.targets:g}",
                "ranks do not see the samples of one process, or counts are not summed over ranks",
                "the loader's order (data/order.py), the tally in trainer/step.py",
            )
    return None


def _one_rank_drifts(case: Case) -> Clue | None:
    names = [n for n in case.got.drift if n in case.got.weights]
    if not names:
        return None
    return Clue(
        "ranks drift apart",
        names[0],
        f"{len(names)} parameters ended differently on different ranks",
        "ranks applied different updates: a gradient that was not summed, or random numbers in "
        "the optimizer",
        f"the reduction of {names[0]}",
    )


def _update(case: Case) -> Clue | None:
    """All gradients are equal and weights are not."""
    kinds = {d.what for d in case.comparison.differences}
    if "weights" not in kinds or kinds & {"gradient", "used", "gradient norm"}:
        return None
    first = next(d for d in case.comparison.differences if d.what == "weights")
    return Clue(
        "optimizer step",
        first.name,
        f"every gradient is equal, the weights end {first.size:.1e} of their norm apart",
        "the optimizer's step on the pieces of this layout is not its step on the whole, or its "
        "hyper-parameters (groups, weight decay) differ",
        "the optimizer's groups and its step on slices",
    )


def _as_seen(case: Case) -> Clue:
    first = case.comparison.first
    if first is None:
        return Clue("none", "", "nothing differs", "", "")
    where = f"step {case.expected.rows[first.row].step}" if first.row >= 0 else "the end"
    return Clue(
        "unknown",
        first.name,
        f"the {first.what} differs at {where} by {first.size:.1e}, {first.bound:.0e} is allowed",
        "no known mistake looks like this",
        "the step of the first difference",
    )


def _moves(case: Case, name: str) -> bool:
    return not torch.equal(case.expected.start[name], case.expected.weights[name])


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


LOOKS: tuple[Callable[[Case], Clue | None], ...] = (
    _frozen_moved,
    _decisions_differ,
    _targets,
    _norms_differ,
    _stale,
    _nothing_moves,
    _buffers_drift,
    _gradient,
    _one_rank_drifts,
    _update,
)
