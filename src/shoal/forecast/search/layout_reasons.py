"""Sentences that explain a ranking: the better layout, the first limit, and the fix.

Every sentence follows from the two estimates that it compares. The field's guide (below 1B ddp,
1–10B fsdp, above that tensor × pipeline × data) is the usual choice by hand; its layout is
predicted like any other, for comparison.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.text.units import bytes_text, count_text, seconds_text
from shoal.forecast.fit.memory_instants import is_sharded, local_ranks, whole_elements
from shoal.forecast.search.layout_search import (
    SAME,
    LayoutCandidate,
    least_memory_bytes,
    least_node_bytes,
    search_layouts,
)
from shoal.forecast.search.search_space import SearchSpace
from shoal.planning.layout_guide import DDP_BELOW, FSDP_UP_TO

PART_WORDS = {
    "matrix": "matrix products",
    "elementwise": "element-wise work",
    "constants": "launching and loops",
    "recompute": "recomputing",
    "tensor": "tensor-parallel messages",
    "context": "context-parallel messages",
    "experts": "tokens on their way to experts",
    "pipeline": "messages between stages",
    "bubble": "the pipeline's bubble",
    "imbalance": "uneven stages",
    "gradients": "summing gradients",
    "parameters": "gathering parameters",
    "optimizer": "the optimizer",
    "offload": "moving states to the host",
}
"""Names of the parts of a step's time in sentences."""

GROWS = {
    "activations": "grow with samples per micro-batch and sequence",
    "working": "grows with samples per micro-batch and sequence",
    "loss": "grows with samples per micro-batch and vocabulary",
    "gathered": "grows with the width of a block",
    "buckets": "grow with the model",
    "weights": "grow with the model",
    "gradients": "grow with the model",
    "optimizer": "grows with the model",
    "allocator": "grows with everything",
    "context": "grows with the number of communicators",
}


def shape_text(case: PlanningCase) -> str:
    """Return a short text of a layout with its policies.

    >>> from shoal.base.layouts.layout import Layout
    >>> layout_text(Layout(pp=16, dp_replicate=128, tp=8))
    '3d: pp 16 · dp 128 · tp 8'
    """
    words = [layout_text(case.layout)]
    if case.layout.pp > 1:
        words.append(case.schedule + (f" ×{case.chunks}" if case.chunks > 1 else ""))
    words.append(f"micro-batch {case.micro_batch}")
    if case.plan.recompute != "none":
        words.append(f"recompute {case.plan.recompute}")
    if case.plan.offload != "none":
        where = " to files" if case.plan.states_in_files else ""
        words.append(f"offload {case.plan.offload}{where}")
    if case.plan.reshard != "yes":
        words.append(f"reshard {case.plan.reshard}")
    return ", ".join(words)


def layout_text(layout: Layout) -> str:
    """Return a text with strategy and degrees of a layout."""
    parts = []
    if layout.pp > 1:
        parts.append(f"pp {layout.pp}")
    if layout.data_degree > 1:
        split = layout.dp_shard > 1 < layout.dp_replicate
        parts.append(
            f"dp {layout.dp_replicate}×{layout.dp_shard}" if split else f"dp {layout.data_degree}"
        )
        if layout.zero and layout.tp * layout.pp * layout.cp > 1:
            parts.append(f"zero {layout.zero}")
    parts += [f"{axis} {n}" for axis in ("cp", "tp", "ep") if (n := getattr(layout, axis)) > 1]
    if layout.threads > 1:
        parts.append(f"{layout.threads} threads")
    name = layout.strategy
    return f"{name}: {' · '.join(parts)}" if parts else name


def explain_order(first: LayoutCandidate, second: LayoutCandidate) -> str:
    """Return one sentence: the advantages of the first layout over the second, and their price."""
    if first.verdict.starts and not second.verdict.starts:
        return f"fits at every instant, unlike {layout_text(second.case.layout)}"
    if first.runs and not second.runs:
        lacking = bytes_text(-second.verdict.margin_bytes)
        return f"{layout_text(second.case.layout)} lacks {lacking}"
    ratio = second.time.step_s / first.time.step_s - 1
    if first.verdict.after == "fits" and second.verdict.after == "tight":
        faster = f", which would be {-ratio:.0%} faster" if ratio < -SAME else ""
        return f"fits for sure, unlike {layout_text(second.case.layout)}{faster}"
    margin, other = first.verdict.margin_bytes, second.verdict.margin_bytes
    if first.verdict.after == second.verdict.after == "tight" and other < 0 <= margin:
        faster = f", which would be {-ratio:.0%} faster" if ratio < -SAME else ""
        over = bytes_text(-other)
        return f"{layout_text(second.case.layout)} is estimated {over} over{faster}"
    if abs(ratio) <= SAME or ratio < 0:
        said = f"within {max(SAME, -ratio):.0%}"
        if first.verdict.after == second.verdict.after:
            return f"{said} of {layout_text(second.case.layout)}, and plainer"
        return f"{said} of {layout_text(second.case.layout)}, with more memory left"
    names = {*first.time.parts, *second.time.parts}
    gains = {n: second.time.parts.get(n, 0.0) - first.time.parts.get(n, 0.0) for n in names}
    best = max(gains, key=lambda n: gains[n])
    worst = min(gains, key=lambda n: gains[n])
    text = (
        f"{ratio:.0%} faster than {layout_text(second.case.layout)}: "
        f"{seconds_text(gains[best])} less for {PART_WORDS.get(best, best)}"
    )
    if gains[worst] < -0.1 * gains[best]:
        text += f", {seconds_text(-gains[worst])} more for {PART_WORDS.get(worst, worst)}"
    return text


def explain_peak(candidate: LayoutCandidate) -> str:
    """Return a sentence with the largest part of the peak, and the setting that it grows with."""
    parts = {k: v for k, v in candidate.memory.parts.items() if k in GROWS}
    if not parts:
        return ""
    name = max(parts, key=lambda k: parts[k])
    share = parts[name] / candidate.memory.peak_bytes
    return f"{name} ({bytes_text(parts[name])}, {share:.0%} of the peak): {GROWS[name]}"


def explain_start(best: LayoutCandidate) -> str:
    """Describe the other instant that ends a run whose steps would fit; "" if there is none.

    Returns:
        A sentence with the instant, its bytes, the capacity, and a change that would suffice (see
        `verdict.starts`).
    """
    if best.verdict.starts:
        return ""
    case, word = best.case, best.verdict
    one = next(one for one in best.memory.instants if one.name == word.instant)
    if word.place == "host":
        size = (
            f"{bytes_text(one.host_bytes)} in a node's {bytes_text(least_node_bytes(case.cluster))}"
        )
    else:
        most = least_memory_bytes(case.cluster)
        size = f"{bytes_text(one.device_bytes)} on one device of {bytes_text(most)}"
    weights = f"all {count_text(whole_elements(case))} weights"
    builder = "give a function that builds the model, which then runs once per machine, in files"
    if one.name == "building" and word.place == "host":
        return (
            f"while building, each of a node's {local_ranks(case)} ranks holds {weights}: {size}; "
            f"try: {builder if is_sharded(case) else 'layout.strategy=fsdp'}"
        )
    if one.name == "building" and case.handed == "device" and is_sharded(case):
        return (
            f"while building, {weights} stand on every device already, beside its part: {size}; "
            f"try: {builder}, or the module on the CPU"
        )
    if one.name == "building":
        return (
            f"while building, a device holds its part of {weights} and the largest unit whole: "
            f"{size}; try: more devices, or smaller blocks"
        )
    if one.name == "proving":
        return f"while proving, in float64: {size}; try: train.prove=off"
    if one.name == "checking":
        return (
            f"while checking, a layer is computed whole in float64: {size}; try: a layout "
            f"without tp and cp"
        )
    at = "in its first step" if one.name == "first step" else f"while {one.name}"
    return f"{at}: {size}; try: more nodes, or machines with more memory"


def guide_layout(parameters: int, cluster: Cluster, heads: int, blocks: int) -> Layout:
    """Return the layout of the field's guide.

    >>> from shoal.forecast.machines.cluster_syntax import parse_machines
    >>> guide_layout(70_000_000_000, parse_machines("8x8xH100-80GB"), 64, 80).strategy
    '3d'
    """
    devices = cluster.devices
    if devices == 1:
        return Layout()
    if parameters < DDP_BELOW:
        return Layout(dp_replicate=devices)
    if parameters <= FSDP_UP_TO:
        return Layout(dp_shard=devices, zero=3)
    tp = cluster.per_node
    while tp > 1 and (devices % tp or heads % tp):
        tp //= 2
    pp = 1
    # The depth at which states of 18 bytes per parameter fill at most half of the memory.
    room_bytes = 0.5 * cluster.device.memory_bytes
    while 18 * parameters / (tp * pp) > room_bytes and devices % (2 * tp * pp) == 0:
        if 2 * pp > blocks:
            break
        pp *= 2
    return Layout(pp=pp, dp_replicate=devices // (tp * pp), tp=tp)


def guide_rule(parameters: int) -> str:
    """Return the guide's rule for a number of parameters."""
    if parameters < DDP_BELOW:
        return "below 1B: ddp"
    return "1–10B: fsdp" if parameters <= FSDP_UP_TO else "above 10B: tp × pp × dp"


def compare_with_guide(
    best: LayoutCandidate, space: SearchSpace
) -> tuple[str, LayoutCandidate | None]:
    """Predict the guide's layout for this case; return a sentence about it and the prediction."""
    case = best.case
    model, cluster = case.model, case.cluster
    parameters = model.trainable + model.frozen
    layout = guide_layout(parameters, cluster, model.heads, model.blocks)
    words = f"the field's guide ({guide_rule(parameters)}) says {layout_text(layout)}"
    if layout == case.layout.without_schedule:
        return f"{words}: the same", best
    try:
        other = search_layouts(case, replace(space, layout=layout, degrees=(), zero=None))[0]
    except PlanError as failure:
        return f"{words}, which is not legal here ({failure})", None
    if not other.runs:
        return f"{words}: lacks {bytes_text(-other.verdict.margin_bytes)}, so overruled", other
    slower = other.time.step_s / best.time.step_s - 1
    took = seconds_text(other.time.step_s)
    if other.verdict.after == "tight" and best.verdict.after == "fits":
        return f"{words}: {took}, but its memory is tight, so overruled", other
    if other.verdict.margin_bytes < 0 <= best.verdict.margin_bytes:
        over = bytes_text(-other.verdict.margin_bytes)
        return f"{words}: {took}, but estimated {over} over, so overruled", other
    if slower <= SAME:
        return f"{words}: as fast, {took}", other
    return f"{words}: {slower:.0%} slower ({took}), so overruled", other
