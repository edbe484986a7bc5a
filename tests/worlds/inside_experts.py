"""Names a mistake of our own in gradients of experts that ranks have dealt out: summed over whom?

The backward pass of the exchange brings an expert the gradients of all tokens it saw, from every
rank that exchanges with it; what is left to sum is over ranks that hold the same experts. So:

    over all data-parallel ranks too   a rank's experts get those of other ranks added
    divided by, or times, ep           the exchange is taken for an average, or summed twice
    not at all                         only the tokens of one group of exchanging ranks are in it

To a user the product says that experts alone are wrong, and by how much.
"""

from __future__ import annotations

import torch

from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_sums import (
    TOLERANCE,
    GradientSums,
    find_factor,
    group_values,
    is_near,
    norm_of,
)

NAME = "factor of ep"
WHERE = "see over which axes they are summed (Placement.sum_over)"


def experts(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """Only gradients of experts are wrong."""
    got = evidence.got
    if got.layout.ep == 1 or not set(sums.names) <= set(got.experts) or not sums.loss_right:
        return None
    more = f"{len(sums.names)} parameters" if len(sums.names) > 1 else "it"
    seen = f"at step {sums.step} the gradient of {more}, experts dealt to {got.layout.ep} ranks, is"
    times = find_factor(sums, sums.names)
    for value in (float(got.layout.ep), 1.0 / got.layout.ep):
        if times is not None and is_near(times, value):
            return Clue(
                NAME,
                sums.names[0],
                f"{seen} {times:.6g} × that of one process; all others are right",
                "the exchange's backward pass has brought the gradients of all ranks' tokens "
                f"already: they are {'summed' if value > 1 else 'averaged'} over ep ranks again",
                WHERE,
            )
    if all(_mixed(sums.right[name], sums.wrong[name], got.layout.ep) for name in sums.names):
        return Clue(
            NAME,
            sums.names[0],
            f"{seen} on every rank the sum over the experts of {got.layout.ep} ranks; all others "
            f"are right",
            "gradients of experts are summed over all data-parallel ranks, also those that hold "
            "other experts",
            WHERE,
        )
    return _not_summed(sums, evidence, seen)


def _not_summed(sums: GradientSums, evidence: Evidence, seen: str) -> Clue | None:
    degree, values = evidence.got.layout.data_degree, evidence.weights
    by_rank = group_values(values, lambda i: i % degree, degree) if values else None
    own = [str(rank) for rank, value in enumerate(by_rank or ()) if is_near(value, 1.0)]
    none = [value for value in by_rank or () if is_near(value, 0.0)]
    if not by_rank or not own or not none or len(own) + len(none) < len(by_rank):
        return None
    return Clue(
        "experts not summed",
        sums.names[0],
        f"{seen} that of the tokens of data-parallel ranks {', '.join(own)} only",
        "several ranks hold the same experts, each for the ranks that exchange with it, and the "
        "sum over them is missing",
        WHERE,
    )


def _mixed(right: torch.Tensor, wrong: torch.Tensor, ep: int) -> bool:
    """Whether every rank's experts have the sum of all ranks' experts."""
    by_rank = right.unflatten(0, (ep, -1))
    everyone = by_rank.sum(0, keepdim=True).expand_as(by_rank)
    return norm_of(wrong.unflatten(0, (ep, -1)) - everyone) <= TOLERANCE * norm_of(everyone)
