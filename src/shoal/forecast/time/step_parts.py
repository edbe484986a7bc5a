"""Costs of some units and their collectives on one rank per micro-batch, as additive terms.

    tensor       per block 2 all-reduces of the activations per pass (or gather + scatter)
    context      keys and values around the ring, the part that attention cannot overlap
    experts      per pass 2 all-to-alls of the tokens
    pipeline     one message each way, per chunk
    block, micro_batch   one event per block, per micro-batch

Sources: Narayanan et al. 2021 (collectives per block), Liu et al. 2023 (ring attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.estimates.estimate import PlanningCase, UnitFacts
from shoal.forecast.memory.model_states import rank_elements
from shoal.forecast.time.collective_time import (
    NOTHING,
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    axis_group,
    send_cost,
)
from shoal.forecast.time.framework_overlap import FrameworkOverlap
from shoal.forecast.time.step_work import unit_work


@dataclass(frozen=True)
class UnitCosts:
    """Costs of some units on one rank: terms per micro-batch, and the rank's elements.

    Attributes:
        compute_s: products, attention and the rest.
        forward_s, again_s: parts of compute_s: the forward pass, and recomputation.
        parameters: all elements.
        experts: part of `parameters` in experts.
        saved_bytes: of one sample, kept for the backward pass.
        sent: of one micro-batch.
    """

    terms: dict[str, float]
    compute_s: float = 0.0
    forward_s: float = 0.0
    again_s: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    saved_bytes: float = 0.0
    sent: CollectiveCost = NOTHING

    def times(self, count: float) -> UnitCosts:
        """Return the costs of `count` units that are equal to this one."""
        return UnitCosts(
            {term: seconds * count for term, seconds in self.terms.items()},
            self.compute_s * count,
            self.forward_s * count,
            self.again_s * count,
            self.parameters * count,
            self.experts * count,
            self.saved_bytes * count,
            self.sent.times(count),
        )

    def __add__(self, other: UnitCosts) -> UnitCosts:
        terms = dict(self.terms)
        _add_terms(terms, other.terms, 1.0)
        return UnitCosts(
            terms,
            self.compute_s + other.compute_s,
            self.forward_s + other.forward_s,
            self.again_s + other.again_s,
            self.parameters + other.parameters,
            self.experts + other.experts,
            self.saved_bytes + other.saved_bytes,
            self.sent + other.sent,
        )


def _add_terms(into: dict[str, float], terms: dict[str, float], times: float) -> None:
    for term, seconds in terms.items():
        into[term] = into.get(term, 0.0) + seconds * times


def units_cost(
    case: PlanningCase, habits: FrameworkOverlap, units: Sequence[UnitFacts], in_block: bool
) -> UnitCosts:
    """Return the costs of all of these units together."""
    terms: dict[str, float] = {}
    compute = forward = again = parameters = experts = saved = 0.0
    layout = case.layout
    for unit in units:
        times = unit.count
        work = unit_work(case, habits, unit, in_block=in_block)
        _add_terms(terms, work.terms, times)
        compute += work.compute_s * times
        forward += work.forward_s * times
        again += work.again_s * times
        held = rank_elements(unit, layout, case.layout.ep, case.expert_tp_degree)
        parameters += sum(held) * times
        experts += held.experts * times
        saved += (unit.saved_split_bytes / layout.tp + unit.saved_plain_bytes) * times
    return UnitCosts(terms, compute, forward, again, parameters, experts, saved)


def block_collectives_cost(
    case: PlanningCase, habits: FrameworkOverlap, unit: UnitFacts
) -> UnitCosts:
    """Return the collectives of the ranks that share one block's work, and the block's event."""
    layout, cluster = case.layout, case.cluster
    found, sent = {"block": 1.0}, NOTHING
    passes = 3 if case.plan.recompute == "full" else 2
    whole = unit.input_bytes * case.micro_batch / layout.cp
    if layout.tp > 1:
        group = axis_group(cluster, layout.tp, 1)
        cost = all_reduce_cost(group, whole).times(2 * passes)
        found["tensor" + group.suffix] = cost.seconds
        sent += cost
    if layout.cp > 1:
        group = axis_group(cluster, layout.cp, layout.tp)
        model = case.model
        share = model.kv_heads / model.heads if model.heads else 1.0
        # forward keys and values, backward also their gradients: 3 rounds of the ring
        cost = all_gather_cost(group, 2 * share * whole * layout.cp / layout.tp).times(3)
        attention_s = unit_work(case, habits, unit, in_block=True).terms["attention"]
        found["context" + group.suffix] = max(0.0, cost.seconds - attention_s)
        sent += cost
    if case.layout.ep > 1 and unit.routed_bytes:
        group = axis_group(cluster, case.layout.ep, layout.tp * layout.cp)
        tokens = unit.routed_bytes * case.micro_batch / layout.cp
        tokens /= layout.tp if case.plan.sequence_parallel != "off" else 1
        cost = all_to_all_cost(group, tokens).times(2 * passes)
        found["experts" + group.suffix] = cost.seconds
        sent += cost
    return UnitCosts(found, sent=sent)


def end_all_reduce_cost(case: PlanningCase, unit: UnitFacts) -> UnitCosts:
    """Return one all-reduce of activations: the embedding's forward, the head's backward."""
    if case.layout.tp == 1:
        return UnitCosts({})
    group = axis_group(case.cluster, case.layout.tp, 1)
    cost = all_reduce_cost(group, unit.input_bytes * case.micro_batch / case.layout.cp)
    return UnitCosts({"tensor" + group.suffix: cost.seconds}, sent=cost)


def stage_messages_cost(case: PlanningCase, habits: FrameworkOverlap, unit: UnitFacts) -> UnitCosts:
    """Return one micro-batch's messages between stages, and the micro-batch's event."""
    layout = case.layout
    if layout.pp == 1:
        return UnitCosts({"micro_batch": 1.0})
    parts = layout.tp if case.plan.sequence_parallel != "off" or habits.splits_messages else 1
    message = unit.input_bytes * case.micro_batch / layout.cp / parts
    stride = layout.tp * layout.cp * layout.data_degree
    cost = send_cost(case.cluster, stride, message, layout.pp)
    cost = cost.times(2 * case.chunks)
    name = "pipeline_across" if cost.across_bytes else "pipeline"
    return UnitCosts({"micro_batch": 1.0, name: cost.seconds}, sent=cost)
