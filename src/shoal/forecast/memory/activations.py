"""Activation memory of one rank: saved for the backward, and working memory of one block.

    kept      micro-batches in flight × Σ over the rank's units of activations after recompute
    halved    gradients of products' outputs between the two halves of a split backward
    loss      its backward follows at once, unless the schedule delays it (gpipe, zero-bubble): then
              every micro-batch in flight also keeps the loss's tensors; under dualpipe one loss
              waits while the rank's other stage runs backward
    working   of the heaviest block: gradients in flight, gathered inputs, and with recompute all
              recomputed activations
    split     tensor parallelism divides the tensors between a block's two products; the rest only
              with sequence parallelism; context parallelism divides everything

Source: Korthikanti et al. 2022 (2205.05198) §4; the kinds of bytes: `transformer_costs`.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.schedule_names import canonical_schedule
from shoal.forecast.memory.framework_memory import FrameworkMemory
from shoal.forecast.memory.model_states import WIDTHS
from shoal.planning.pipeline_bubble import micro_batches_in_flight
from shoal.planning.pipeline_stages import (
    StageUnits,
    deferred_weight_gradients,
    is_block,
    repeated_units,
)

PUT_OFF = ("gpipe", "zero-bubble")
"""Schedules in which other passes run between the last stage's forward and its whole backward."""


class ActivationShares(NamedTuple):
    """Factors from a sample's bytes to a rank's: of split, plain and replicated tensors."""

    split: float
    plain: float
    whole: float
    tp: int


class ActivationBytes(NamedTuple):
    """Bytes of a stage's activations: kept in all, of its head, of its heaviest block, working.

    Attributes:
        waiting: of a head and its loss while another stage of the rank runs backward.
    """

    kept: float
    head: float
    block: float
    again: float
    working: float
    waiting: float = 0.0


def activation_shares(case: PlanningCase) -> ActivationShares:
    """Return a rank's shares of one sample's bytes, times its micro-batch."""
    layout = case.layout
    whole = case.micro_batch / layout.cp
    split = whole / layout.tp
    return ActivationShares(
        split, split if case.plan.sequence_parallel != "off" else whole, whole, layout.tp
    )


def predict_activations(
    case: PlanningCase, habits: FrameworkMemory, stage: StageUnits
) -> ActivationBytes:
    """Return all activation bytes of one pipeline rank."""
    by = activation_shares(case)
    flying, halved = 1.0, 0.0
    if case.layout.pp > 1:
        place = (case.schedule, case.layout.pp, case.accumulate, stage.rank)
        flying, halved = (
            micro_batches_in_flight(*place, case.chunks),
            deferred_weight_gradients(*place),
        )
    kept = head = block = again = working = 0.0
    around: dict[str, float] = {}
    for (unit, count), (saved, one) in zip(
        stage.units, saved_by_unit(case, habits, stage), strict=True
    ):
        if is_block(unit):
            if unit.block not in ("", "-") and case.plan.recompute == "full":
                around[unit.block] = around.get(unit.block, 0.0) + count * saved
            block, again = max(block, saved), max(again, saved - one)
            working = max(working, _working_bytes(case, unit, by))
            if case.plan.offload == "activations":
                kept = max(kept, 2 * one)
            else:  # dualpipe's model copies share the micro-batches in flight
                kept += flying * count / stage.copies * one
                kept += halved * count / stage.copies * _product_bytes(unit, by)
        elif unit.loss_bytes:
            head = one
            kept += (_losses_in_flight(case, flying) - 1) * (one + saved_by_loss(case, stage))
        else:
            kept += flying * count * one
    again = max([again, *around.values()])
    waiting = head + saved_by_loss(case, stage) if stage.head and stage.copies > 1 else 0.0
    return ActivationBytes(
        kept + head, head, block, again, working + _ring_bytes(case, by), waiting
    )


def saved_by_unit(
    case: PlanningCase, habits: FrameworkMemory, stage: StageUnits
) -> list[tuple[float, float]]:
    """Return per unit the bytes saved in one micro-batch, and those left by recompute."""
    by = activation_shares(case)
    found: list[tuple[float, float]] = []
    around: set[str] = set()
    for unit, count in stage.units:
        one = saved = _saved_bytes(case, habits, unit, by)
        if is_block(unit):
            one = saved if unit.block == "-" else _bytes_after_recompute(case, unit, by, saved)
            if unit.block not in ("", "-") and case.plan.recompute == "full":
                # A larger block keeps only its first unit's input, and is recomputed as a whole.
                one = 0.0 if unit.block in around else one / count
                around.add(unit.block)
        found.append((saved, one))
    return found


def _losses_in_flight(case: PlanningCase, flying: float) -> float:
    """Return the micro-batches whose loss waits for its backward, on the rank that has it."""
    return flying if canonical_schedule(case.schedule) in PUT_OFF and case.layout.pp > 1 else 1.0


def saved_by_loss(case: PlanningCase, stage: StageUnits) -> float:
    """Return the bytes of one micro-batch from the loss's forward to its backward.

    A chunked loss keeps the gradients that its forward pass makes: of hidden states, and of the
    head's weight. Other losses keep the normalised logits.
    """
    head = stage.head
    if head is None:
        return 0.0
    by = activation_shares(case)
    if case.loss != "chunked":
        return head.loss_bytes / 3 * (by.split if case.loss == "parallel" else by.whole)
    return boundary_bytes(case.model) * by.whole + waiting_head_bytes(case, stage)


def boundary_bytes(model: ModelFacts) -> float:
    """Return the bytes of one sample between blocks, which pipelines send and the head reads."""
    blocks = repeated_units(model)
    return max((unit.input_bytes for unit in blocks), default=model.units[-1].input_bytes)


def head_elements(case: PlanningCase, stage: StageUnits) -> float:
    """Return this rank's elements of the matrix that makes logits."""
    head = stage.head
    if head is None:
        return 0.0
    if head.tied_to:
        head = next(unit for unit in case.model.units if unit.name == head.tied_to)
    return (head.parameters - head.plain_parameters) / case.layout.tp


def waiting_head_bytes(case: PlanningCase, stage: StageUnits) -> float:
    """Return the bytes of the head's weight gradient that a chunked loss makes in its forward.

    The gradient waits until the backward reaches the weight: of a tied one, the embedding's.
    """
    if case.loss != "chunked":
        return 0.0
    return head_elements(case, stage) * max(4, WIDTHS[case.plan.compute])


def _product_bytes(unit: UnitFacts, by: ActivationShares) -> float:
    """Return the bytes of one unit's matrix-product outputs, and thus of their gradients."""
    split, plain = unit.selective_bytes
    return split * by.split + plain * by.plain


def _bytes_after_recompute(
    case: PlanningCase, unit: UnitFacts, by: ActivationShares, saved: float
) -> float:
    """Return the bytes kept of one block and micro-batch under the case's recompute."""
    if case.plan.recompute == "none":
        return saved
    if case.plan.recompute == "full":
        return unit.input_bytes * by.plain
    return _product_bytes(unit, by)


def _saved_bytes(
    case: PlanningCase, habits: FrameworkMemory, unit: UnitFacts, by: ActivationShares
) -> float:
    """Return the bytes that one unit saves per micro-batch without recompute."""
    total = unit.saved_split_bytes * by.split + unit.saved_plain_bytes * by.plain
    if unit.routed_bytes and by.tp > 1 and case.expert_tp_degree > 1:
        # experts split over tp see the tokens of all tp ranks: their inputs are not split
        total += unit.routed_bytes * (by.whole - by.split)
    if unit.routed_saved_bytes and case.layout.ep > 1:
        total += (habits.imbalance - 1) * unit.routed_saved_bytes * by.split
    if by.tp > 1 and case.plan.sequence_parallel != "off" and not habits.gathers_again:
        gathered = 2 if is_block(unit) else 1 if unit.loss_bytes else 0  # inputs of its products
        model = case.model
        one = model.hidden * model.element_bytes * model.sequence
        total += gathered * one * (by.whole - by.plain)
    return total


def _working_bytes(case: PlanningCase, unit: UnitFacts, by: ActivationShares) -> float:
    held = unit.working_bytes * by.split
    if by.tp > 1 and case.plan.sequence_parallel != "off":  # a gathered input and its gradient
        held += 2 * unit.input_bytes * by.whole
    return held


def _ring_bytes(case: PlanningCase, by: ActivationShares) -> float:
    """Return the bytes of a ring neighbour's keys and values, and of their gradients."""
    model = case.model
    if case.layout.cp == 1 or not model.heads:
        return 0.0
    return 4 * model.units[-1].input_bytes * model.kv_heads / model.heads * by.split
