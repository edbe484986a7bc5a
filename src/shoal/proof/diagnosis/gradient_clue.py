"""Locate and measure the first wrong gradient, and name a setting that avoids it.

    where       the first parameter that differs, how many others do and what they have in common (a
                stage, whole or in parts over tensor-parallel ranks, experts); which ranks hold the
                same part of it and disagree, and along which axis
    how much    zero; one factor, and whether it is the degree of an axis; a weight for each data
                rank or micro-batch; rounding to a narrow format; else a share of the whole
    which pass  the loss is right: the backward pass went wrong; it is not: the forward pass did

These give the axis under suspicion, and with it a setting that avoids it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.layouts.layout import Layout
from shoal.proof.diagnosis.clue import OURS, REPORT, Clue, format_ranks
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.diagnosis.gradient_sums import (
    TOLERANCE,
    GradientSums,
    common_value,
    find_factor,
    group_values,
    is_near,
    norm_of,
)
from shoal.proof.diagnosis.norm_mismatch import diagnose_norm
from shoal.proof.distances import norm_over
from shoal.proof.trajectory_record import StepRow, TrajectoryRecord

AXES = {
    "tp": ("tensor-parallel ranks", "the split of layers over tensor-parallel ranks"),
    "cp": ("context-parallel ranks", "the split of sequences over context-parallel ranks"),
    "pp": ("ranks of the pipeline", "the pipeline"),
    "ep": ("expert-parallel ranks", "the exchange of tokens between ranks that hold experts"),
    "dp": ("data-parallel ranks", "the sum over data-parallel ranks"),
}
"""The ranks of an axis, and what they do to a model, in words. dp: both data axes together."""

FEW = 12
"""Most weights in a message."""


@dataclass(frozen=True)
class _ErrorSize:
    """Size of the error of gradients, as the end of a sentence.

    Attributes:
        axes: those that the numbers suggest.
        cause: if the numbers alone determine it.
    """

    text: str
    axes: tuple[str, ...] = ()
    cause: str = ""


def axis_degree(layout: Layout, axis: str) -> int:
    """Return the degree of one of `AXES`."""
    return layout.data_degree if axis == "dp" else int(getattr(layout, axis))


def diagnose_gradient(evidence: Evidence) -> Clue | None:
    """Return a clue on the place and size of the first wrong gradient, or gradient norm."""
    sums, number = evidence.sums, evidence.number
    if sums is None or number is None:
        return None
    if not sums.names:
        return diagnose_norm(evidence, number)
    where = _describe_others(sums, evidence.got)
    known = _diagnose_mean_of_means(evidence, sums, where) or _diagnose_rounding(
        evidence, sums, where
    )
    if known is not None:
        return known
    rows = evidence.expected.rows[number], evidence.got.rows[number]
    amount = _measure_error(evidence, sums, rows)
    axes = _find_suspect_axes(evidence, sums, amount)
    is_forward = not (sums.loss_right or amount.cause)
    behind = "sum over ranks" if axes == ("dp",) else "backward pass"
    right = _describe_loss(sums, rows) + _describe_short_step(sums)
    right += _describe_right_rest(sums, evidence.got)
    return Clue(
        "forward pass" if is_forward else behind,
        sums.names[0],
        f"{where} {amount.text}{_describe_holders(sums)}{right}",
        amount.cause or _format_cause(axes, is_forward),
        _format_advice(evidence.got.layout, axes, is_forward),
    )


# ---- where


def describe_common(names: Sequence[str], got: TrajectoryRecord) -> str:
    """Return in words what the wrong parameters have in common in the layout, if anything."""
    words = []
    if got.layout.ep > 1 and set(names) <= set(got.experts):
        words.append(f"only experts, dealt to {got.layout.ep} ranks")
    if names and all(name in got.held for name in names):
        stages = {got.held[name].stages for name in names}
        if got.layout.pp > 1 and len(stages) == 1:
            numbers = sorted(*stages)
            on = f"stage{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"
            words.append(f"{'all' if _is_whole_stage(names, got) else 'only'} of {on}")
        if got.layout.tp > 1 and len({got.held[n].tp_cut is None for n in names}) == 1:
            how = "whole" if got.held[names[0]].tp_cut is None else "in parts"
            words.append(f"only what tensor-parallel ranks hold {how}")
    return f" ({', '.join(words)})" if words else ""


def _is_whole_stage(names: Sequence[str], got: TrajectoryRecord) -> bool:
    """Return whether these are all parameters of their stage."""
    stages = got.held[names[0]].stages
    return set(names) == {n for n, one in got.held.items() if one.stages == stages}


def _describe_others(sums: GradientSums, got: TrajectoryRecord) -> str:
    """Return the sentence's part on the other wrong gradients, after the first one's name."""
    others = len(sums.names) - 1
    tied = [second for second, first in got.tied.items() if first == sums.names[0]]
    also = f" (it is {' and '.join(tied)} too)" if tied and not others else ""
    more = "those" if others > 1 else "that"
    like = f", like {more} of {others} other parameter{'s' * (others > 1)}" if others else ""
    return (
        f"at step {sums.step} its "
        f"gradient{also}{like}{describe_common(sums.names, got)}{',' * bool(like)}"
    )


def _describe_holders(sums: GradientSums) -> str:
    """Return in words which ranks disagree about the gradient of a part that each of them holds."""
    name = next((n for n in sums.names if n in sums.apart), None)
    if name is None:
        return ""
    one, right = sums.apart[name], sums.right[name]
    added = norm_of(one.total - right) <= TOLERANCE * norm_of(right)
    of = "of it" if name == sums.names[0] else f"of {name}"
    return (
        f"; {format_ranks(one.ranks)}, which differ along layout.{one.along} only and hold the "
        "same "
        f"part {of}, have different gradients{', whose sum is the right one' * added}"
    )


def _describe_loss(sums: GradientSums, rows: tuple[StepRow, StepRow]) -> str:
    if sums.loss_right:
        return "; the loss is right"
    ours, theirs = ("not finite" if row.loss is None else f"{row.loss:.8g}" for row in rows)
    return f"; the loss is {theirs} instead of {ours}"


def _describe_short_step(sums: GradientSums) -> str:
    """Return a remark if only a short last step is wrong."""
    if sums.short is None:
        return ""
    return (
        f"; the full steps before it are equal, and this one holds {sums.short:.3g} × the targets "
        f"of the one before"
    )


def _describe_right_rest(sums: GradientSums, got: TrajectoryRecord) -> str:
    """Return the parameters whose gradients are right: backward goes from last to first."""
    order = [n for n in got.trainable if n in sums.right]
    last = order.index(sums.names[-1])
    behind = next((n for n in order[last + 1 :] if norm_of(sums.right[n])), None)
    return f"; from {behind} on all gradients are right" if behind else ""


# ---- how much


def _measure_error(
    evidence: Evidence, sums: GradientSums, rows: tuple[StepRow, StepRow]
) -> _ErrorSize:
    """Return the gradients' error as the simplest fit: a factor, micro-batch weights, or a norm."""
    if all(not norm_of(sums.wrong[n]) for n in sums.names):
        skipped = "; the step was skipped on all ranks" if rows[1].skipped else ""
        return _ErrorSize(f"is 0, in one process it is not{skipped}")
    times = find_factor(sums, sums.names)
    if times is not None and not is_near(times, 1.0):
        return _describe_factor(evidence, sums, times, rows)
    values = evidence.weights or ()
    odd = [i for i, v in enumerate(values) if not math.isnan(v) and not is_near(v, 1.0)]
    if odd and evidence.micro_batch_gradients is not None:
        by_rank = group_values(
            values, evidence.micro_batch_gradients.rank_of, evidence.micro_batch_gradients.ranks
        )
        if by_rank is not None and common_value(by_rank) is None:
            return _ErrorSize(
                f"holds the micro-batches of the {len(by_rank)} data-parallel ranks with the "
                f"weights {_format_weights(by_rank)} instead of 1 each",
                ("dp",),
            )
        if len(odd) <= len(values) / 2:
            shown = ", ".join(f"{i} with weight {_format_weights([values[i]])}" for i in odd[:FEW])
            batches = f"micro-batch{'es' * (len(odd) > 1)}"
            return _ErrorSize(
                f"holds {batches} {shown} instead of 1 (of {len(values)} in the step)"
            )
        return _ErrorSize(
            f"holds the step's micro-batches with the weights {_format_weights(values)}"
        )
    size = norm_over(sums.wrong[n] - sums.right[n] for n in sums.names)
    whole = norm_over(sums.right.values())
    fits = ", which no weights of micro-batches explain" if evidence.shares is not None else ""
    together = ", together" if len(sums.names) > 1 else ""
    far = size / whole if whole else math.inf
    return _ErrorSize(f"is off{together} by {far:.1e} of the whole gradient's norm{fits}")


def _describe_factor(
    evidence: Evidence, sums: GradientSums, times: float, rows: tuple[StepRow, StepRow]
) -> _ErrorSize:
    """Describe one factor in every element, and the axis whose degree it is."""
    layout = evidence.got.layout
    degrees = {axis: axis_degree(layout, axis) for axis in AXES}
    axes = tuple(
        a for a, d in degrees.items() if d > 1 and (is_near(times, d) or is_near(times, 1 / d))
    )
    whose = [AXES[axis][0] for axis in axes]
    text = f"is {times:.6g} × that of one process"
    if axes:
        ranks = " and ".join(f"{degrees[axis]} {AXES[axis][0]}" for axis in axes)
        text += f", {'1/' * (times < 1)}{degrees[axes[0]]} for {ranks}"
    count = (
        len(evidence.micro_batch_gradients.gradients)
        if evidence.micro_batch_gradients is not None
        else 0
    )
    if count > 1 and (is_near(times, count) or is_near(times, 1 / count)):
        text += f", {'1/' * (times < 1)}{count} for {count} micro-batches"
        whose.append("micro-batches")
    if sums.short is not None:
        return _ErrorSize(text, (), "a short step is divided by another count than its own")
    ours, theirs = (row.loss for row in rows)
    is_scale = sums.loss_right or (theirs and ours and is_near(theirs / ours, times))
    if not is_scale:  # the loss has not the same factor
        return _ErrorSize(text, axes)
    how = "averaged where they should be summed" if times < 1 else "summed more than once"
    if whose:
        return _ErrorSize(text, axes, f"gradients are {how}, over {' or '.join(whose)}")
    return _ErrorSize(
        text, axes, "gradients are divided by another number than the count of targets"
    )


def _format_weights(values: Sequence[float]) -> str:
    # Solving leaves noise of either sign where a weight is 0, NaN where there was no gradient.
    told = ("–" if math.isnan(v) else f"{0.0 if is_near(v, 0.0) else v:.4g}" for v in values[:FEW])
    shown = " : ".join(told)
    return shown + (" : …" if len(values) > FEW else "")


def _diagnose_mean_of_means(evidence: Evidence, sums: GradientSums, where: str) -> Clue | None:
    """Return a clue if the numbers are those of a mean of means.

    A mean of n means weighs part i by N / (n · Nᵢ); the Nᵢ add up to N.
    """
    values, atoms = evidence.weights, evidence.micro_batch_gradients
    if values is None or atoms is None or atoms.ranks == 1:
        return None
    each = tuple(v for v in values if not math.isnan(v))
    by_rank = group_values(values, atoms.rank_of, atoms.ranks)
    for kind, group in (("ranks", by_rank), ("micro-batches", each)):
        if not group or common_value(group) is not None or not all(v > TOLERANCE for v in group):
            continue
        if is_near(sum(1 / v for v in group) / len(group), 1.0):
            return Clue(
                "mean of means",
                sums.names[0],
                f"{where} is off: the {kind} weigh {_format_weights(group)}, each with the "
                "inverse of its "
                f"share of the targets",
                f"the mean over {kind} of their own means: with unequal counts of targets that is "
                f"not the mean over targets",
                "let the loss give sums, as (sum, count) or one value per target, and divide by "
                f"nothing in gradient hooks of your own; without such a division, {REPORT}",
            )
    return None


def _diagnose_rounding(evidence: Evidence, sums: GradientSums, where: str) -> Clue | None:
    """Return a clue if errors are small and random: numbers were stored with fewer digits."""
    times = find_factor(sums, sums.names)
    told = [*(evidence.weights or ()), *(() if times is None else (times,))]
    if not sums.loss_right or sums.apart or not all(math.isnan(v) or is_near(v, 1.0) for v in told):
        return None
    pairs = ((sums.wrong[n] - sums.right[n], sums.right[n]) for n in sums.names)
    shares = [(norm_of(difference), norm_of(right)) for difference, right in pairs]
    size, whole = (math.hypot(*norms) for norms in zip(*shares, strict=True))
    # A mistake in one place makes some parameters very wrong; rounding makes none very wrong.
    worst = max(far / right if right else math.inf for far, right in shares)
    if not whole or not math.isfinite(size):
        return None
    for name, low, high in (("bf16", 2.0**-11, 2.0**-5), ("float32", 2.0**-28, 2.0**-18)):
        if low <= size / whole and worst <= high:
            return Clue(
                f"{name} accumulation",
                sums.names[0],
                f"{where} is off by {size / whole:.1e} of itself, in random directions, as {name} "
                f"rounds",
                f"gradients are summed or sent in {name}",
                f"look for casts to {name} in backward passes and gradient hooks of your own; "
                f"try: precision.reduce=fp32; without any cast, {REPORT}",
            )
    return None


# ---- why, and what next


def _find_suspect_axes(
    evidence: Evidence, sums: GradientSums, amount: _ErrorSize
) -> tuple[str, ...]:
    """Return the axes that may be at fault, those that only sum gradients last."""
    got, names = evidence.got, sums.names
    there = tuple(axis for axis in AXES if axis_degree(got.layout, axis) > 1)
    apart = tuple(dict.fromkeys(sums.apart[n].along for n in names if n in sums.apart))
    if apart:
        return apart
    if "ep" in there and set(names) <= set(got.experts):
        return ("ep",)
    if "tp" in there and all(name in got.held for name in sums.right):
        cut = {got.held[n].tp_cut is None for n in names}
        if len(cut) == 1 and len({got.held[n].tp_cut is None for n in sums.right}) == 2:
            return ("tp",)
    if amount.axes:
        return amount.axes
    return tuple(axis for axis in there if axis != "dp") or ("dp",)


def _format_cause(axes: tuple[str, ...], is_forward: bool) -> str:
    works = " or ".join(AXES[axis][1] for axis in axes)
    if axes != ("dp",):
        where = "in the forward pass" if is_forward else "in its backward pass"
        return f"{works} computes something else {where} than one process"
    if not is_forward:
        return f"{works} leaves something out, or scales what ranks bring to it"
    return (
        "the model, the loss or the data give something else on some ranks: they look at the rank, "
        "keep something from one micro-batch to the next, or draw random numbers of their own"
    )


def _format_advice(layout: Layout, axes: tuple[str, ...], is_forward: bool) -> str:
    near_by = suggest_settings(layout, axes)
    if axes != ("dp",):
        return f"{near_by}{'unless the model looks at its rank, ' * is_forward}{OURS}"
    own = (
        "the rank, state kept between calls, and random numbers in forward pass, loss and data"
        if is_forward
        else "gradient hooks of your own, and code between the backward pass and the step"
    )
    return f"look for {own}; {near_by}without any, {REPORT}"


def suggest_settings(layout: Layout, axes: Sequence[str]) -> str:
    """Return settings that avoid some of `AXES`, as the beginning of an advice, or "".

    >>> suggest_settings(Layout(tp=2, pp=2), ("tp", "pp"))
    'try: layout.tp=1, or layout.pp=1; '
    >>> (
    ...     suggest_settings(Layout(dp_shard=4), ("dp",)),
    ...     suggest_settings(Layout(dp_replicate=4), ("dp",)),
    ... )
    ('try: layout.dp_replicate=4 and layout.dp_shard=1; ', '')
    """
    without = [
        f"layout.{axis}=1" for axis in axes if axis != "dp" and axis_degree(layout, axis) > 1
    ]
    if "dp" in axes and layout.dp_shard > 1:
        without.append(f"layout.dp_replicate={layout.data_degree} and layout.dp_shard=1")
    return f"try: {', or '.join(without)}; " if without else ""
