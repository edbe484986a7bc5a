"""Compute of one pipeline stage's units per micro-batch, in seconds of plain arithmetic.

For one unit and one micro-batch, forward + backward (twice the forward) + recomputation:

    matrix       products with weights: FLOP / (peak · the ladder's share at that size)
    attention    queries with keys, weights with values: FLOP / peak
    elementwise  bytes read and written by everything else / bytes per second of the memory
    loss         bytes of logits and their gradients / bytes per second
    weights      every weight is read once per pass: bytes / bytes per second
    launch       kernels · seconds to launch one: on the host, in parallel with the device

Tensor parallelism divides all terms but norms and residual sums, which only sequence parallelism
divides. Context parallelism divides all but the weights.
Sources: Korthikanti et al. 2022 (2205.05198): terms that tp divides; PaLM (2204.02311), appendix B:
two products in the backward for each of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from shoal.base.errors import PlanError, nearest_word
from shoal.base.estimates.cluster import Device
from shoal.base.estimates.estimate import PlanningCase, UnitFacts
from shoal.forecast.memory.model_states import rank_elements
from shoal.forecast.time.framework_overlap import FrameworkOverlap

PRODUCTS_PER_BLOCK = 4
"""Large products of one block (qkv, output, up, down): the ladder uses their mean size."""

PLAIN_PASSES = 10
"""Passes of a block's norms and residual sums over a tensor as large as its input."""

COMPILED_SHARE = 0.5
"""Share of element-wise bytes and launches that remains when a compiler fuses them."""


@dataclass(frozen=True)
class UnitWork:
    """Terms of one unit and one micro-batch, over all passes.

    Attributes:
        compute_s: products, attention and the rest, all passes.
        forward_s: part of it in the forward pass.
        again_s: part of it in recomputation.
    """

    terms: dict[str, float]
    compute_s: float
    forward_s: float
    again_s: float


def peak_flops_per_s(device: Device, compute: str) -> float:
    """Return the device's dense peak in a format; fp16 and bf16 substitute each other.

    fp64 has no substitute.

    Raises:
        PlanError: the device has no known rate for the format.
    """
    rates = device.matrix_flops_per_s
    other = {"bf16": "fp16", "fp16": "bf16"}.get(compute, compute)
    rate = rates.get(compute) or rates.get(other)
    if not rate:
        close = nearest_word(compute, rates) or next(iter(rates), "none is known")
        raise PlanError(
            f"precision.compute = {compute}: no matrix rate is known for {device.name}, which has "
            f"{', '.join(rates) or 'none'}; try: precision.compute={close}"
        )
    return rate


def interpolate_ladder(
    ladder: tuple[tuple[float, float], ...], size: float, default: float
) -> float:
    """Interpolate a ladder of (size, value) at a size; return the default for an empty ladder.

    Interpolation is linear on a logarithmic scale of sizes; outside, the nearest rung counts.

    >>> ladder = ((1e6, 0.2), (1e8, 0.8))
    >>> [round(interpolate_ladder(ladder, flops, 1.0), 2) for flops in (1e3, 1e6, 1e7, 1e9)]
    [0.2, 0.2, 0.5, 0.8]
    """
    if not ladder:
        return default
    if size <= ladder[0][0]:
        return ladder[0][1]
    low = ladder[0]
    for high in ladder[1:]:
        if size <= high[0]:
            # a lowest rung at 0 has no logarithm: interpolate there on a linear scale
            above = low[0] > 0
            part = log(size / low[0]) / log(high[0] / low[0]) if above else size / high[0]
            return low[1] + part * (high[1] - low[1])
        low = high
    return low[1]


def recompute_shares(
    case: PlanningCase, habits: FrameworkOverlap, in_block: bool
) -> tuple[float, float, float]:
    """Return the shares of matrix products, attention and other work that a unit recomputes."""
    if not in_block or case.plan.recompute == "none":
        return 0.0, 0.0, 0.0
    if case.plan.recompute == "full":
        return 1.0, 1.0, 1.0
    if case.plan.recompute == "selective":
        return habits.selective
    raise PlanError(
        f"memory.recompute = {case.plan.recompute}: not one of none, selective, full; "
        f"try: {nearest_word(case.plan.recompute, ('none', 'selective', 'full')) or 'none'}"
    )


def unit_work(
    case: PlanningCase, habits: FrameworkOverlap, unit: UnitFacts, *, in_block: bool
) -> UnitWork:
    """Return the terms of one unit for one micro-batch on one rank."""
    device, layout = case.cluster.device, case.layout
    peak = peak_flops_per_s(device, case.plan.compute)
    part = case.micro_batch / layout.cp
    split = part / layout.tp
    wrapped = in_block and unit.block != "-"  # recompute and compile act on blocks in lists
    again = recompute_shares(case, habits, wrapped)
    fused = COMPILED_SHARE if case.plan.compile != "none" and wrapped else 1.0
    products = (unit.forward_flops - unit.attention_flops) * split
    one = products / (PRODUCTS_PER_BLOCK if in_block else 1)
    matrix = products / (peak * interpolate_ladder(device.ladder_of(case.plan.compute), one, 1.0))
    attention = unit.attention_flops * split / peak
    plain = min(unit.elementwise_bytes, PLAIN_PASSES * unit.input_bytes)
    plain_split = split if case.plan.sequence_parallel != "off" else part
    moved = (unit.elementwise_bytes - plain) * split + plain * plain_split
    memory = interpolate_ladder(
        device.stream_ladder, unit.input_bytes * part, device.stream_bytes_per_s
    )
    rest = moved / memory * fused
    held = sum(rank_elements(unit, layout, case.layout.ep, case.expert_tp_degree))
    # a measured ladder includes reading the weights
    read = held * case.model.element_bytes if products and not device.ladders else 0.0
    stream = device.stream_bytes_per_s
    terms = {
        "matrix": matrix * (3 + again[0]),
        "attention": attention * (3 + again[1]),
        "elementwise": rest * (3 + again[2]),
        "weights": read / stream * (3 + again[0]),
        "loss": unit.loss_bytes * (split if case.loss == "parallel" else part) / stream,
        "launch": unit.operations * fused * _operation_s(case, again[2]),
    }
    forward = matrix + attention + rest
    repeats = matrix * again[0] + attention * again[1] + rest * again[2]
    return UnitWork(terms, 3 * forward + repeats, forward, repeats)


def _operation_s(case: PlanningCase, again: float) -> float:
    """Return host seconds of one forward operation, its backward, and its recomputation."""
    known = case.cluster.calibration.constants_s
    forward = known.get("operation", case.cluster.device.launch_s)
    return forward * (1 + again) + known.get("operation_backward", 2 * forward)
