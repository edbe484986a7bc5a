"""A wrong loss of a divided model: which mistake, made in one process, gives it?

While weights are still equal, only the forward pass can make the loss of a step differ. What such
mistakes compute is what one process computes with other weights, or with its blocks in another
order:

    row bias               a bias that every rank adds to its summand      bias × degree
    fused weight           q, k and v cut as one segment, read as three    rows in another order
    shared heads           every rank takes its neighbour's key/value part rows rotated
    stage order            stages run in another order                     blocks exchanged
    position restart       ranks count their own tokens from 0             positions modulo S / cp

Each is tried on the step's own micro-batches; the one whose loss is the layout's loss, in all its
digits, is the cause. Only what the record says of the layout is tried, so these are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from shoal.proof.atoms import Again
from shoal.proof.clue import Clue
from shoal.proof.mistakes import Suspicion, fused, orders, positions, row_biases, shared
from shoal.proof.record import Record

SAME, SAME_ROUNDED = 1e-10, 1e-5
"""Losses nearer than this share are one: in float64, in shorter formats."""


def wrong_loss(expected: Record, got: Record, again: Again | None, number: int) -> Clue | None:
    """The mistake that gives the loss of row `number`, whose weights still were right."""
    ours, theirs = expected.rows[number], got.rows[number]
    if again is None or not got.held or ours.loss is None or theirs.loss is None:
        return None
    exact = all(t.dtype == torch.float64 for t in expected.gradients[number].values())
    same = SAME if exact else SAME_ROUNDED
    if math.isclose(ours.loss, theirs.loss, rel_tol=10 * same):
        return None
    if not math.isclose(again.loss(lambda module: nullcontext()), ours.loss, rel_tol=same):
        return None  # the step cannot be repeated: what it gives would tell nothing
    for one in _suspicions(got, again, ours.label):
        if math.isclose(again.loss(one.mistake), theirs.loss, rel_tol=same):
            seen = (
                f"the loss at step {ours.step} is {theirs.loss:.8g} instead of {ours.loss:.8g}: "
                f"one process gets that with {one.seen}"
            )
            return Clue(one.name, one.parameter, seen, one.cause, one.look)
    return None


def _suspicions(got: Record, again: Again, label: str) -> Iterator[Suspicion]:
    start = f"{label}/" if label else ""
    held = {
        name.removeprefix(start): one for name, one in got.held.items() if name.startswith(start)
    }
    weights, degrees = again.kept, got.degrees
    if degrees.get("tp", 1) > 1:
        for look in (row_biases, fused, shared):
            yield from look(held, weights, degrees["tp"])
    if degrees.get("cp", 1) > 1:
        yield from positions(weights, degrees["cp"], again.tokens)
    if degrees.get("pp", 1) > 1:
        yield from orders(held, weights)
