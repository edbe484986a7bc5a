"""Names a mistake of our own in gradients under tensor, context or pipeline parallelism.

What these layouts add to a step, and so what can be missing in it:

    replicas      several ranks hold the same part of a parameter; every one may have only its own
                  share of the gradient, and the shares must be added up, once
    backward      an activation's gradient is summed over tensor-parallel ranks where it leaves
                  split work, and sent from stage to stage; without that all parameters before the
                  place are wrong, and those behind it right, while the loss is exact
    micro-batches a stage must run all of them, and add up what they give

To a user the product says which parameters are wrong, by how much, and along which axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from inside_data_parallel import some
from shoal.proof.diagnosis.clue import Clue, join_numbers
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_clue import AXES, describe_common
from shoal.proof.diagnosis.gradient_sums import (
    TOLERANCE,
    GradientSums,
    accept_shares,
    find_factor,
    is_near,
    norm_of,
    solve_micro_batch_shares,
)
from shoal.proof.trajectory_record import TrajectoryRecord

MOST = 0.8
"""Share of the parameters before a place that are wrong if a backward pass broke there."""


# ---- replicas


def replicas(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """Ranks that hold the same part have different gradients of it."""
    apart, got = [name for name in sums.names if name in sums.apart], evidence.got
    if not apart or not sums.loss_right:
        return None
    added = [n for n in apart if _are(sums.apart[n].total, sums.right[n])]
    adds_up = "; their sum is the right one" if added else ""
    name = (added or apart)[-1]  # the nearest to the loss
    along = {sums.apart[n].along for n in apart}
    if along == {"pp"}:
        return _tie_not_summed(sums, got, name, adds_up)
    if along == {"cp"}:
        return Clue(
            "part gradients not summed",
            name,
            f"the {got.layout.cp} context-parallel ranks all hold {some(apart)} and have "
            f"different gradients at step {sums.step}{adds_up}",
            "each rank sees its own tokens only, and the sum over them once a step is missing",
            "see what is summed over context-parallel ranks (Placement.sum_over)",
        )
    degree = got.layout.tp
    if set(sums.names) == set(added):
        return Clue(
            "part gradients not summed",
            name,
            f"the {degree} tensor-parallel ranks hold {some(added)} whole and have different "
            f"gradients of it at step {sums.step}{adds_up}; all other gradients are right",
            "each rank sees a part of the work only (its query heads of shared key/value heads, "
            "its part of the sequence of a norm), and the sum over them once a step is missing",
            "see the partial parameters of the split (BlockSplit.partial)",
        )
    seen = f"each of the {degree} tensor-parallel ranks has another gradient of it at step "
    behind = _behind(sums.names, sums, got)
    return Clue(
        "missing backward reduction",
        name,
        f"{seen}{sums.step}{adds_up}, while the loss is right{_right_behind(behind)}",
        "an activation that all ranks hold went into split layers, and its gradient, a part on "
        "every rank, is not summed on the way back",
        "see the all-reduce in the backward pass of autograd_collectives.enter, behind this "
        "parameter",
    )


def _tie_not_summed(sums: GradientSums, got: TrajectoryRecord, name: str, adds_up: str) -> Clue:
    tied = [second for second, first in got.tied.items() if first == name]
    also = f" (it is {' and '.join(tied)} too)" if tied else ""
    return Clue(
        "tie not summed",
        name,
        f"stages {join_numbers(got.held[name].stages)} both hold it{also} and have different gradients "
        f"of it at step {sums.step}{adds_up}",
        "each stage keeps the share of its own use of the weight: the sum over the stages that "
        "hold it is missing",
        "see which parameters are summed over stages (Placement.sum_over)",
    )


def tie_twice(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """What several stages hold has a whole multiple of its gradient."""
    held = evidence.got.held
    names = [n for n in sums.names if n in held and len(held[n].stages) > 1]
    if len(names) < len(sums.names):
        return None
    times = find_factor(sums, names)
    if times is None or not is_near(times, round(times)) or round(times) < 2:
        return None
    return Clue(
        "tie counted twice",
        names[0],
        f"its gradient at step {sums.step} is {times:.4g} × that of one process; stages "
        f"{join_numbers(held[names[0]].stages)} hold it",
        "the sum over the stages that share it is done more than once",
        "see what is summed over stages (Placement.sum_over), and after which sum",
    )


# ---- backward


def border(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """All parameters before a place are wrong, those behind it right, the loss too."""
    got = evidence.got
    if not got.held or not sums.loss_right or evidence.weights is not None:
        return None
    stage = _last_stage_wrong(sums, got)
    if stage is not None:
        later = next(n for n in got.trainable if n in sums.right and got.held[n].stages[0] > stage)
        return Clue(
            "gradient between stages",
            sums.names[-1],
            f"at step {sums.step} the loss is right and so are all gradients from {later} on; "
            f"{some(sums.names)} are wrong: all before stage {stage + 1}",
            "the gradients that a stage sends back to the one before it are lost, in another "
            "order, or of another micro-batch",
            "see what a stage gives back for its arrivals (pipeline/runtime.py, messages.py)",
        )
    order = [n for n in got.trainable if n in sums.right]
    last = max(order.index(name) for name in sums.names)
    behind = _behind(sums.names, sums, got)
    if got.layout.tp == 1 or not behind or len(sums.names) < MOST * (last + 1):
        return None
    return Clue(
        "missing backward reduction",
        order[last],
        f"the gradient of {some(sums.names)} is wrong at step {sums.step}, while the loss is "
        f"right{_right_behind(behind)}",
        "a sum over tensor-parallel ranks is missing, or done twice, in the backward pass of a "
        "split layer",
        f"see the exchanges behind {order[last]}: autograd_collectives.enter, and "
        f"autograd_collectives.gather under sequence parallel",
    )


# ---- micro-batches, factors

DROPPED = "micro-batch dropped"
"""Name of a cause."""


def dropped(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """Whole micro-batches are missing, on some stages or on all."""
    got, names, values = evidence.got, sums.names, evidence.weights
    if got.layout.pp == 1:
        return None
    if values is None:  # a tied weight mixes what two stages give
        names = _of_one_stage(sums, got)
        values = (
            accept_shares(
                solve_micro_batch_shares(replace(sums, names=names), evidence.micro_batch_gradients)
            )
            if names
            else None
        )
    known = [i for i, value in enumerate(values or ()) if not math.isnan(value)]
    gone = [i for i in known if is_near(values[i], 0.0)]
    rest = [values[i] for i in known if i not in gone]
    if not gone or not rest or not all(is_near(value, 1.0) for value in rest):
        return None
    one = len(gone) == 1
    return Clue(
        DROPPED,
        names[0],
        f"at step {sums.step} micro-batch{'' if one else 'es'} {join_numbers(gone)} of {len(values)} "
        f"{'has' if one else 'have'} no share in the gradient of {some(names)}"
        f"{describe_common(names, got)}",
        "the pipeline never ran its backward pass there, or what came of it was not added",
        "see the action list (planning/pipeline_schedules.py), and what runs it (pipeline/runtime.py)",
    )


def factor(sums: GradientSums, evidence: Evidence) -> Clue | None:
    """All wrong gradients by the degree of an axis, or by the number of micro-batches."""
    got, times = evidence.got, find_factor(sums, sums.names)
    if times is None or is_near(times, 1.0) or sums.short is not None:
        return None
    seen = (
        f"the gradient of {some(sums.names)} at step {sums.step} is {times:.6g} × that of one "
        f"process{describe_common(sums.names, got)}"
    )
    everything = len(sums.names) == len(sums.right)
    for axis in ("tp", "pp", "cp"):
        degree, ranks = got.layout.degrees[axis], AXES[axis][0]
        if degree == 1 or (everything and degree == got.layout.data_degree):
            continue
        for value, what in ((float(degree), "done twice"), (1 / degree, "an average, or missing")):
            if is_near(times, value):
                return Clue(
                    f"factor of {axis}",
                    sums.names[0],
                    f"{seen}; there are {degree} {ranks}",
                    f"a sum over the {ranks} is {what}",
                    "see over which ranks it is summed (Placement.sum_over), and what the loss is "
                    "multiplied by",
                )
    count = (
        len(evidence.micro_batch_gradients.gradients)
        if evidence.micro_batch_gradients is not None
        else 0
    )
    if count > 1 and is_near(times, 1 / count) and count != got.layout.data_degree:
        return Clue(
            "average over micro-batches",
            sums.names[0] if not everything else "",
            f"{seen}; the step has {count} micro-batches",
            "their gradients are averaged as they come instead of summed, and then divided by the "
            "count of targets of the whole step as well",
            "see how gradients add up between micro-batches (pipeline/runtime.py, the reducer)",
        )
    return None


# ---- inside


def _last_stage_wrong(sums: GradientSums, got: TrajectoryRecord) -> int | None:
    """The stage up to which gradients are wrong, if all later stages have right ones."""
    at = {n: got.held[n].stages[0] for n in sums.right if len(got.held[n].stages) == 1}
    wrong = [at[n] for n in sums.names if n in at]
    last = max(wrong, default=max(at.values(), default=0))
    before = [n for n, stage in at.items() if stage <= last and norm_of(sums.right[n])]
    return last if len(before) < len(at) and len(wrong) >= MOST * len(before) else None


def _of_one_stage(sums: GradientSums, got: TrajectoryRecord) -> tuple[str, ...]:
    """The wrong ones that lie on one stage alone, of the last such stage."""
    alone = [n for n in sums.names if n in got.held and len(got.held[n].stages) == 1]
    last = max((got.held[n].stages for n in alone), default=())
    return tuple(n for n in alone if got.held[n].stages == last)


def _behind(names: Sequence[str], sums: GradientSums, got: TrajectoryRecord) -> list[str]:
    """Parameters after the last wrong one, in the module's order, whose gradients are right."""
    order = [n for n in got.trainable if n in sums.right]
    last = max(order.index(name) for name in names)
    return [name for name in order[last + 1 :] if norm_of(sums.right[name])]


def _right_behind(behind: Sequence[str]) -> str:
    return f" and all gradients from {behind[0]} on are too" if behind else ""


def _are(one: torch.Tensor, other: torch.Tensor) -> bool:
    return norm_of(one - other) <= TOLERANCE * norm_of(other)
