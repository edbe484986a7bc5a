"""Name the likely cause of a difference: one line with the numbers, their cause and a remedy.

Causes are tried in the order in which they explain each other. A weight that should not move, or
ranks that decide differently, make all later gradients wrong, so they come first. Then the place
and size of the first wrong gradient are described (gradient_clue.py); any other difference is
reported as observed. Every cause named here is one that a user's model, optimizer, data or hooks
can have; a mistake inside Shoal is located and measured, and is to be reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.proof.diagnosis.clue import OURS, REPORT, Clue, format_ranks
from shoal.proof.diagnosis.evidence import CauseTest, Evidence
from shoal.proof.diagnosis.gradient_clue import (
    AXES,
    axis_degree,
    diagnose_gradient,
    suggest_settings,
)
from shoal.proof.diagnosis.norm_mismatch import diagnose_rank_norms

UNMOVED_SHARE = 0.02
"""Share of unchanged elements from which a slice counts as stale."""


def explain_difference(evidence: Evidence, inside: Sequence[CauseTest] = ()) -> Clue:
    """Name the likely cause of the first difference.

    Args:
        inside: causes that are tried before the product's own.
    """
    for look in (*inside, *LOOKS):
        clue = look(evidence)
        if clue is not None:
            return clue
    return _describe_observed(evidence)


def _frozen_moved(evidence: Evidence) -> Clue | None:
    got = evidence.got
    for name in got.frozen:
        if not torch.equal(got.start[name], got.weights[name]):
            return Clue(
                "frozen parameter moved",
                name,
                "it does not train (requires_grad is off), yet it ended other than it began",
                "weight decay, or an optimizer, reaches parameters that are frozen",
                "give optimizers only what trains, [p for p in parameters if p.requires_grad], and "
                f"look for lines of your own that write to it; without any, {REPORT}",
            )
    return None


def _decisions_differ(evidence: Evidence) -> Clue | None:
    for rows in zip(*evidence.got.rank_rows, strict=False):
        skipped = [rank for rank, row in enumerate(rows) if row.skipped]
        if skipped and len(skipped) < len(rows):
            return Clue(
                "decision on one rank",
                rows[0].label,
                f"step {rows[0].step} was skipped by {format_ranks(skipped)} of {len(rows)} only",
                "each rank decides by its own numbers whether to step (overflow, loss scale, a "
                "non-finite gradient); all ranks must decide together",
                "look for a skip, a return or a loss scaler of your own that one rank's batch can "
                f"set off alone; without any, {REPORT}",
            )
    return None


def _nothing_moves(evidence: Evidence) -> Clue | None:
    expected, got = evidence.expected, evidence.got
    trained = [n for n in got.trainable if not torch.equal(expected.start[n], expected.weights[n])]
    still = [n for n in trained if torch.equal(got.start[n], got.weights[n])]
    if not still:
        return None
    if len(still) == len(trained):
        return Clue(
            "optimizer over other tensors",
            still[0],
            f"all {len(still)} parameters that should move end exactly where they began",
            "the optimizer steps over other tensors than the model's: it was built before the "
            "weights were sharded, cast or moved",
            "build the optimizer after shoal.parallelize, or hand over a function params -> "
            f"optimizer; where that is so already, {REPORT}",
        )
    return Clue(
        "parameter not stepped",
        still[0],
        f"{len(still)} of {len(trained)} parameters that should move end exactly where they began",
        "the optimizer's groups lack them, or what it steps is a copy of them",
        f"look at the optimizer's parameter groups; where they hold all of them, {REPORT}",
    )


def _weights_stale(evidence: Evidence) -> Clue | None:
    got = evidence.got
    for name in got.trainable:
        start, ended = got.start[name], got.weights[name]
        should = evidence.expected.weights[name] != evidence.expected.start[name]
        stays = (ended == start) & should
        count, all_ = int(stays.sum()), int(should.sum())
        apart = got.drift.get(name)  # a whole parameter that changes on other ranks only
        if all_ and count / all_ >= UNMOVED_SHARE and (count < all_ or apart):
            where = f"on rank 0; {_format_groups(apart)}" if apart else "on all ranks"
            return Clue(
                "stale shard",
                name,
                f"{count} of {all_} elements that should move are still as they were at the start, "
                f"{where}",
                "a rank does not see what another one stepped: it goes on with old weights",
                "look for code of your own that keeps or copies weights from before a step; "
                f"{suggest_settings(got.layout, ('dp',))}without any, {OURS}",
            )
    return None


def _buffers_differ(evidence: Evidence) -> Clue | None:
    got = evidence.got
    drift = [n for n in got.drift if n in got.buffers]
    others = [d for d in evidence.comparison.differences if d.what != "buffer"]
    buffers = drift or [d.name for d in evidence.comparison.differences if not others]
    if not buffers or len(drift) < len(got.drift):
        return None
    running = "running_" in buffers[0]
    how = "differently on each rank" if drift else "other than in one process"
    camps = f" ({_format_groups(got.drift[buffers[0]])})" if drift else ""
    return Clue(
        "BatchNorm drift" if running else "buffer drift",
        buffers[0],
        f"{len(buffers)} buffer{'s' if len(buffers) > 1 else ''} ended {how}{camps}, all "
        f"parameters equal",
        "running statistics move by each rank's own micro-batches only"
        if running
        else "the forward pass writes a buffer from this rank's samples",
        f"keep statistics in torch.nn.BatchNorm layers, whose own are kept alike; where they are "
        f"such layers, {REPORT}"
        if running
        else "let the buffer depend on weights or a count of steps, not on samples; only the value "
        "of rank 0 is kept",
    )


def _targets_differ(evidence: Evidence) -> Clue | None:
    layout = evidence.got.layout
    found = next((d for d in evidence.comparison.differences if d.what == "targets"), None)
    if found is None:
        return None
    ours, theirs = evidence.expected.rows[found.row], evidence.got.rows[found.row]
    seen = f"step {ours.step} counted {theirs.targets:g} targets, "
    for axis in ("tp", "pp", "cp"):
        degree, (ranks, _) = axis_degree(layout, axis), AXES[axis]
        if degree > 1 and math.isclose(theirs.targets, ours.targets * degree):
            return Clue(
                "count of targets",
                found.name,
                f"{seen}{degree} × the {ours.targets:g} of one process; there are {degree} {ranks}",
                f"each of the {ranks} tells the loss and the count of them all",
                f"{suggest_settings(layout, (axis,))}{OURS}",
            )
    return Clue(
        "count of targets",
        found.name,
        f"{seen}one process {ours.targets:g}",
        "ranks do not see the samples of one process, or the loss counts by something that differs "
        "between ranks",
        "see that the dataset gives the same sample for the same index in every process, and that "
        f"the loss counts targets only; {suggest_settings(layout, ('tp', 'pp', 'cp'))}where "
        "both are so, "
        f"{REPORT}",
    )


def _ranks_drift(evidence: Evidence) -> Clue | None:
    drift = {n: ranks for n, ranks in evidence.got.drift.items() if n in evidence.got.weights}
    if not drift:
        return None
    name = next(iter(drift))
    return Clue(
        "ranks drift apart",
        name,
        f"{len(drift)} parameters ended differently on different ranks "
        f"({_format_groups(drift[name])})",
        "ranks applied different updates: a gradient that was not summed, or random numbers in "
        "the optimizer",
        f"look for random numbers in the optimizer, and for code of your own that changes weights "
        f"or gradients on some ranks; without any, {REPORT}",
    )


def _update_differs(evidence: Evidence) -> Clue | None:
    """Return a clue if all gradients are equal and weights are not."""
    kinds = {d.what for d in evidence.comparison.differences}
    if "weights" not in kinds or evidence.number is not None:
        return None
    first = next(d for d in evidence.comparison.differences if d.what == "weights")
    return Clue(
        "optimizer step",
        first.name,
        f"every gradient is equal, the weights end {first.size:.1e} of their norm apart",
        "the optimizer's step on the pieces of this layout is not its step on the whole, or its "
        "hyper-parameters (groups, weight decay) differ",
        "look for what the optimizer computes from a whole tensor (norms, means, factors), and for "
        f"groups that it finds by name or shape; "
        f"{suggest_settings(evidence.got.layout, ('dp',))}without any, {REPORT}",
    )


def _describe_observed(evidence: Evidence) -> Clue:
    first = evidence.comparison.first
    if first is None:
        return Clue("none", "", "nothing differs", "", "")
    where = f"step {evidence.expected.rows[first.row].step}" if first.row >= 0 else "the end"
    return Clue(
        "unknown",
        first.name,
        f"the {first.what} differs at {where} by {first.size:.1e}, {first.bound:.0e} is allowed",
        "no known mistake looks like this",
        f"prove with another layout, which tells whether it depends on this one, and {REPORT}",
    )


def _format_groups(groups: list[list[int]]) -> str:
    """Return in words which ranks agree with each other.

    >>> _format_groups([[0, 1], [2]]), _format_groups([[0], [1], [2]])
    ('ranks 0 and 1 against rank 2', 'each of 3 ranks has its own')
    """
    if len(groups) > 2 and all(len(group) == 1 for group in groups):
        return f"each of {len(groups)} ranks has its own"
    return " against ".join(format_ranks(group) for group in groups)


LOOKS: tuple[CauseTest, ...] = (
    _frozen_moved,
    _decisions_differ,
    _targets_differ,
    diagnose_rank_norms,
    _weights_stale,
    _nothing_moves,
    _buffers_differ,
    diagnose_gradient,
    _ranks_drift,
    _update_differs,
)
