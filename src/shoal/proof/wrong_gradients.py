"""The first wrong gradient, taken apart: a wrong scale, a wrong sum, or a wrong format?

Each reader below knows one family of mistakes; the first that recognises its own speaks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from shoal.proof.clue import Clue
from shoal.proof.divided import (
    border,
    dropped,
    factor,
    last_words,
    replicas,
    some,
    tie_twice,
    where,
)
from shoal.proof.experts import experts
from shoal.proof.micro_batch_gradients import Again, Atoms, Shares
from shoal.proof.norms import wrong_norm
from shoal.proof.sums import (
    TOLERANCE,
    Sums,
    factor_of,
    fits,
    groups,
    near,
    norm_of,
    same,
    solve,
    sums_of,
)
from shoal.proof.trajectory_record import Record
from shoal.proof.verdict import whole_norm

Forward = Callable[[Record, Record, Again | None, int], Clue | None]
"""Names what went wrong in the forward pass of a row of (expected, got), where it knows it."""


def wrong_gradient(
    expected: Record, got: Record, atoms: Atoms | None, number: int, forward: Forward | None = None
) -> Clue | None:
    """The clue in row `number`, the first with a wrong gradient or gradient norm.

    forward   asked first
    """
    sums = sums_of(expected, got, number)
    if not sums.names:
        return wrong_norm(expected, got, number)
    if forward is not None:
        with contextlib.suppress(Exception):  # the user's code, run once more
            if clue := forward(expected, got, atoms.again if atoms else None, number):
                return clue
    solved = solve(sums, atoms)
    for read in READERS:
        clue = read(sums, got, atoms, solved)
        if clue is not None:
            return clue
    return _rounded(sums) or last_words(sums, got, solved) or _unexplained(sums, solved)


def _never_summed(
    sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None
) -> Clue | None:
    """Zero, or one rank's own micro-batches and nothing else."""
    last = _bucket_text(got, sums.names)
    if all(not norm_of(sums.wrong[n]) for n in sums.names):
        return Clue(
            "gradient dropped",
            sums.names[0],
            f"the gradient of {some(sums.names)} is 0 at step {sums.step}, in one process it "
            f"is not{last}{where(sums.names, got)}",
            "it never reaches the optimizer: left out of its bucket, or zeroed after it was summed",
            "which parameters the buckets hold, and whether the last bucket is sent",
        )
    values = fits(solved)
    if values is None or atoms is None or atoms.ranks == 1:
        return None
    by_rank = groups(values, atoms.rank_of, atoms.ranks)
    if by_rank is None:
        return None
    own = [rank for rank, value in enumerate(by_rank) if not near(value, 0.0)]
    if len(own) != 1 or len(by_rank) == 1:
        return None
    return Clue(
        "missing reduction",
        sums.names[0],
        f"the gradient of {some(sums.names)} at step {sums.step} is {by_rank[own[0]]:.4g} × what "
        f"rank {own[0]} computed itself, with nothing of the other ranks{last}",
        "it is not summed over ranks: its bucket is not sent, or it is missing in it",
        "the reducer: is every parameter in a bucket, is the last bucket flushed",
    )


def _bucket_text(got: Record, names: Sequence[str]) -> str:
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


def _tie(sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None) -> Clue | None:
    tied = set(got.tied.values())
    if not set(sums.names) <= tied:
        return None
    name = sums.names[0]
    factor = factor_of(sums, [name])
    if factor is None or not near(factor, round(factor)) or round(factor) < 2:
        return None
    return Clue(
        "tie counted twice",
        name,
        f"its gradient at step {sums.step} is {factor:.4g} × that of one process; it is tied to "
        f"{', '.join(s for s, f in got.tied.items() if f == name)}",
        "a tied weight is summed once under each of its names",
        "how the reducer lists tied parameters (each once, by its first name)",
    )


def _whole_scale(
    sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None
) -> Clue | None:
    """Every micro-batch has the same wrong share."""
    factor = factor_of(sums, sums.names)
    if factor is None or near(factor, 1.0):
        return None
    ranks = got.layout.data_degree
    names = f"the gradient of {some(sums.names)} at step {sums.step} is {factor:.6g} × that of one"
    if sums.short is not None:
        return Clue(
            "last short window",
            "",
            f"{names} process; the full steps before it are equal, and this one holds "
            f"{sums.short:.3g} × the targets of the one before",
            "an epoch's short last step is divided by a full step's count (of targets, or of "
            "micro-batches) instead of by its own",
            "what the step divides by in trainer/step.py (update)",
        )
    known = {
        float(ranks): ("factor of ranks", f"summed twice over {ranks} ranks, or each rank divides "
                       f"by its own share of the targets"),
        1 / ranks: ("factor of ranks", f"divided by {ranks} ranks (an average) and by the count "
                    f"of targets as well: a factor {ranks} is lost"),
    }  # fmt: skip
    for value, (name, cause) in known.items():
        if ranks > 1 and near(factor, value):
            exact = f"{'1/' if factor < 1 else ''}{ranks}"
            seen = f"{names} process, {exact} for {ranks} ranks"
            return Clue(name, "", seen, cause, "where gradients are divided: ddp averages?")
    return Clue(
        "token scale",
        "",
        f"{names} process, the same factor in every element",
        "gradients are divided by another count of targets than the whole step's over all ranks",
        "what the step divides by in trainer/step.py (update)",
    )


def _by_rank(sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None) -> Clue | None:
    """Each rank's micro-batches have a share of their own."""
    values = fits(solved)
    if values is None or atoms is None or atoms.ranks == 1:
        return None
    by_rank = groups(values, atoms.rank_of, atoms.ranks)
    each = tuple(v for v in values if not math.isnan(v))
    for kind, group in (("ranks", by_rank), ("micro-batches", each)):
        # A mean of n means weighs part i by N / (n · Nᵢ); the Nᵢ add up to N.
        means = group is not None and all(v > TOLERANCE for v in group)
        if group and means and near(sum(1 / v for v in group) / len(group), 1.0):
            shown = " : ".join(f"{v:.4g}" for v in group[:8])
            return Clue(
                "mean of means",
                "",
                f"at step {sums.step} the {kind} weigh {shown}, each with the inverse of its "
                f"share of the targets",
                f"the mean over {kind} of their own means: with unequal counts of targets that is "
                f"not the mean over targets",
                "what each rank divides by; sums must travel, one division by the total count",
            )
    if by_rank is None or same(by_rank) is not None:
        return None
    shown = " : ".join(f"{v:.4g}" for v in by_rank[:8])
    return Clue(
        "ranks weigh unequally",
        "",
        f"at step {sums.step} the gradients of the ranks have the weights {shown} instead of 1",
        "each rank scales its gradients by something of its own",
        "the scale that each rank applies before the sum",
    )


def _by_place(sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None) -> Clue | None:
    """Earlier micro-batches of the accumulation weigh more, by a factor per place."""
    values = fits(solved)
    if values is None or atoms is None:
        return None
    places = -(-len(values) // atoms.ranks)
    by_place = groups(values, lambda i: i // atoms.ranks, places)
    if by_place is None or len(by_place) < 2 or same(by_place) is not None:
        return None
    ratios = [a / b for a, b in zip(by_place, by_place[1:], strict=False) if b]
    shown = " : ".join(f"{v:.4g}" for v in by_place)
    if all(near(r, float(atoms.ranks)) for r in ratios):
        return Clue(
            "sync on every micro-batch",
            "",
            f"at step {sums.step} the micro-batches of a rank weigh {shown} in their order: each "
            f"is {atoms.ranks} × the next",
            f"gradients are summed over {atoms.ranks} ranks after every micro-batch, and what was "
            f"summed before is summed again",
            "when the reducer is armed: in the last backward pass of a step only",
        )
    return Clue(
        "accumulation",
        "",
        f"at step {sums.step} the micro-batches of a rank weigh {shown} instead of 1",
        "accumulation scales or overwrites what earlier micro-batches gave",
        "how gradients add up between micro-batches",
    )


def _lost(sums: Sums, got: Record, atoms: Atoms | None, solved: Shares | None) -> Clue | None:
    """Some micro-batches are missing, or weigh otherwise than the rest."""
    values = fits(solved)
    if values is None:
        return None
    odd = [i for i, v in enumerate(values) if not math.isnan(v) and not near(v, 1.0)]
    if not odd or len(odd) > len(values) / 2:
        return None
    shown = ", ".join(f"{i} ({values[i]:.4g})" for i in odd[:6])
    lost = all(near(values[i], 0.0) for i in odd)
    return Clue(
        "micro-batch lost" if lost else "micro-batch weighs wrong",
        sums.names[0] if len(sums.names) < len(got.trainable) else "",
        f"at step {sums.step} of {len(values)} micro-batches all but {shown} have their share",
        "a short or last micro-batch is dropped or scaled as if it were full",
        "the last micro-batch of each rank",
    )


def _rounded(sums: Sums) -> Clue | None:
    """Small errors without a direction: numbers were kept in a format with fewer digits."""
    difference = {n: sums.wrong[n] - sums.right[n] for n in sums.names}
    right = {n: sums.right[n] for n in sums.names}
    size, whole = whole_norm(difference), whole_norm(right)
    if not whole or not math.isfinite(size):
        return None
    relative = size / whole
    for name, low, high in (("bf16", 2.0**-11, 2.0**-5), ("float32", 2.0**-28, 2.0**-18)):
        if low <= relative <= high:
            return Clue(
                f"{name} accumulation",
                sums.names[0],
                f"the gradient of {some(sums.names)} at step {sums.step} is off by "
                f"{relative:.1e} of itself, in random directions, as {name} rounds",
                f"gradients are summed or sent in {name}",
                "the dtype of gradient buffers and of the reduction",
            )
    return None


def _unexplained(sums: Sums, solved: Shares | None) -> Clue:
    values = fits(solved)
    if values is not None:
        shown = " : ".join(f"{v:.4g}" for v in values[:12])
        return Clue(
            "micro-batches weigh unequally",
            "",
            f"at step {sums.step} the micro-batches weigh {shown} instead of 1 each",
            "each is scaled by something of its own before the sum",
            "what a micro-batch's loss is multiplied or divided by",
        )
    size = whole_norm({n: sums.wrong[n] - sums.right[n] for n in sums.names})
    whole = whole_norm(sums.right)
    rest = "" if solved is None else f"; no shares of micro-batches explain {solved.residual:.0%}"
    return Clue(
        "wrong gradient",
        sums.names[0],
        f"the gradient of {some(sums.names)} at step {sums.step} is off by {size / whole:.1e} of "
        f"the whole gradient{rest}",
        "something other than scales and sums: other samples, other random numbers, an operation "
        "that the layout splits wrongly",
        f"the forward and backward pass around {sums.names[0]}",
    )


READERS = (
    replicas,
    experts,
    _never_summed,
    tie_twice,
    _tie,
    factor,
    _whole_scale,
    dropped,
    _by_rank,
    _by_place,
    _lost,
    border,
)
"""In the order in which they explain each other."""
