"""Terms of one optimizer step, in seconds of plain arithmetic without efficiencies.

A step consists of *terms*, each the time of an ideal machine (FLOP / peak rate, bytes / bandwidth,
the α–β time of a collective, a count of events). `step_time.py` multiplies them by the machine's
calibration, subtracts overlap, and adds them up.

Per micro-batch and pipeline stage: the work of the units (step_work.py) and the collectives of
these units (step_parts.py).
Per step: data parallelism (step_sync.py), and dualpipe's exchange between its two copies; optimizer
(bytes of states, gradients and weights / bytes per second), offload, step (one event). A
collective's term ends in the placement of its group (`_shared`, `_across`, `_both`:
collective_time.py), since each placement has its own efficiency.
The layout of stages follows Narayanan et al. 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.base.estimates.estimate import PlanningCase, UnitFacts
from shoal.base.layouts.schedule_names import canonical_schedule, model_copies
from shoal.forecast.memory.model_states import ParameterElements, shard_counts
from shoal.forecast.memory.offloaded_bytes import predict_copies as copies_of_offload
from shoal.forecast.time.collective_time import (
    AxisGroup,
    CollectiveCost,
    all_reduce_cost,
    axis_group,
)
from shoal.forecast.time.framework_overlap import FrameworkOverlap, framework_overlap
from shoal.forecast.time.step_parts import (
    UnitCosts,
    block_collectives_cost,
    end_all_reduce_cost,
    stage_messages_cost,
    units_cost,
)
from shoal.forecast.time.step_sync import DataParallelCosts, data_parallel_costs, gradient_bytes
from shoal.forecast.time.step_work import PRODUCTS_PER_BLOCK, interpolate_ladder
from shoal.planning.pipeline_stages import root_share

HOST_BYTES_PER_S = 20e9
"""Default rate between device and host: PCIe 4.0 x16, in practice."""


@dataclass(frozen=True)
class StageTerms:
    """Costs of one kind of pipeline stage.

    Attributes:
        copies: number of stages of this kind.
        fullest: the most blocks of a stage / their mean.
        device: term → seconds of one micro-batch.
        launch_s: seconds of the host's kernel launches, which overlap the device.
        forward, again: shares of the compute: the forward pass, and recomputation.
        parameters: elements that one of its ranks holds before data-parallel splits.
        experts: part of `parameters` in experts.
        outside: part of `parameters` outside blocks.
        blocks: number of blocks.
        sent: per micro-batch.
    """

    copies: int
    fullest: float
    device: dict[str, float]
    launch_s: float
    forward: float
    again: float
    parameters: float
    experts: float
    outside: float
    blocks: float
    saved_bytes: float
    sent: CollectiveCost


@dataclass(frozen=True)
class StepTerms:
    """Terms of one case's step.

    Attributes:
        stages: kinds of stages, first to last.
        sync: data-parallel collectives.
        step: terms that happen once per step.
        beside_s: offload copies that overlap compute.
        sent: link → bytes per step of a rank of the fullest stage.
    """

    case: PlanningCase
    habits: FrameworkOverlap
    stages: tuple[StageTerms, ...]
    sync: DataParallelCosts
    step: dict[str, float]
    beside_s: float
    sent: dict[str, float]


def step_terms(case: PlanningCase) -> StepTerms:
    """Return the terms of a case.

    Raises:
        PlanError: unknown number format, recompute policy or framework.
    """
    habits = framework_overlap(case.framework)
    before, inner, after = _split_units(case.model.units)
    count = sum(unit.count for unit in inner)
    unit = max(inner, key=lambda each: each.count)
    block = units_cost(case, habits, inner, True).times(1 / count) + block_collectives_cost(
        case, habits, unit
    )
    between = stage_messages_cost(case, habits, unit)
    end = end_all_reduce_cost(case, unit)
    ends = (
        units_cost(case, habits, before, False) + end,
        units_cost(case, habits, after, False) + end,
    )
    stages = tuple(
        _make_stage(kind, block, ends, between) for kind in _stage_kinds(case.layout.pp, count)
    )
    held = model_copies(canonical_schedule(case.schedule)) if case.layout.pp > 1 else 1
    full = _multiply_stage(max(stages, key=lambda stage: stage.parameters), held)
    one = ParameterElements(block.parameters - block.experts, block.experts)
    rooted = _root_weight_share(case, inner)
    sync = data_parallel_costs(
        case,
        habits,
        full.blocks if rooted < 1 else 0.0,
        ParameterElements(one.dense * (1 - rooted), one.experts * (1 - rooted)),
        full.outside + rooted * full.blocks * sum(one),
    )
    waits_s, beside_s = _update_seconds(case, full)
    total = sync.total(case.accumulate) + full.sent.times(case.accumulate)
    if held > 1:
        group, cost = _model_copies_sum(case, habits, full)
        waits_s["gradients" + group.suffix] = cost.seconds
        total += cost
    inside, across = case.cluster.inside.name, case.cluster.across.name
    sent = {across: total.across_bytes}
    sent[inside] = sent.get(inside, 0.0) + total.inside_bytes
    return StepTerms(
        case=case,
        habits=habits,
        stages=stages,
        sync=sync,
        step={"step": 1.0, **waits_s},
        beside_s=beside_s,
        sent={link: amount for link, amount in sent.items() if amount},
    )


def _multiply_stage(stage: StageTerms, held: int) -> StageTerms:
    """Return the costs of a rank that holds `held` equal stages and runs one at a time."""
    return replace(
        stage,
        parameters=stage.parameters * held,
        experts=stage.experts * held,
        outside=stage.outside * held,
        blocks=stage.blocks * held,
    )


def _model_copies_sum(
    case: PlanningCase, habits: FrameworkOverlap, stage: StageTerms
) -> tuple[AxisGroup, CollectiveCost]:
    """Return the all-reduce of gradients between dualpipe's two model copies, once a step.

    The two ranks with the same stages are 1 to p − 1 stages apart: p/2 on average.
    """
    layout = case.layout
    apart = layout.tp * layout.cp * layout.data_degree * layout.pp // 2
    group = axis_group(case.cluster, 2, apart)
    dense, experts = shard_counts(case)
    own = (stage.parameters - stage.experts) / dense + stage.experts / experts
    return group, all_reduce_cost(group, own * gradient_bytes(case, habits))


_Units = list[UnitFacts]


def _split_units(units: tuple[UnitFacts, ...]) -> tuple[_Units, _Units, _Units]:
    """Split units into those before the blocks, the blocks (repeated units), and those after."""
    inner = [i for i, unit in enumerate(units) if unit.count > 1]
    if not inner:  # no repetition: all units but the ends count as blocks
        inner = list(range(1, len(units) - 1)) or list(range(len(units)))
    first, last = inner[0], inner[-1]
    return list(units[:first]), list(units[first : last + 1]), list(units[last + 1 :])


class _StageKind(NamedTuple):
    """Group of equal stages: count, mean and most blocks, with embedding, with head."""

    copies: int
    blocks: float
    most: float
    first: bool
    last: bool


def _stage_kinds(stages: int, blocks: int) -> list[_StageKind]:
    """Return the kinds of stages for equal runs of blocks; the remainder goes to the middle.

    >>> [(kind.copies, kind.blocks, kind.most) for kind in _stage_kinds(4, 10)]
    [(1, 2, 2), (2, 3.0, 3), (1, 2, 2)]
    """
    if stages == 1:
        return [_StageKind(1, blocks, blocks, True, True)]
    ends = blocks // stages
    if stages == 2:
        more = blocks - ends
        return [_StageKind(1, more, more, True, False), _StageKind(1, ends, ends, False, True)]
    left, inner = blocks - 2 * ends, stages - 2
    middle = _StageKind(inner, left / inner, -(-left // inner), False, False)
    return [_StageKind(1, ends, ends, True, False), middle, _StageKind(1, ends, ends, False, True)]


def _root_weight_share(case: PlanningCase, inner: Sequence[UnitFacts]) -> float:
    """Return the share of the repeated weights that fsdp keeps in the root."""
    whole = sum(unit.parameters * unit.count for unit in inner)
    if case.layout.zero < 3 or not whole:
        return 0.0
    return sum(root_share(unit) * unit.parameters * unit.count for unit in inner) / whole


def _make_stage(
    kind: _StageKind, block: UnitCosts, ends: tuple[UnitCosts, UnitCosts], between: UnitCosts
) -> StageTerms:
    whole = block.times(kind.blocks) + between
    for held, end in zip((kind.first, kind.last), ends, strict=True):
        if held:
            whole += end
    device = dict(whole.terms)
    launch_s = device.pop("launch", 0.0)
    compute = whole.compute_s
    return StageTerms(
        copies=kind.copies,
        fullest=kind.most / kind.blocks if kind.blocks else 1.0,
        device=device,
        launch_s=launch_s,
        forward=whole.forward_s / compute if compute else 1 / 3,
        again=whole.again_s / compute if compute else 0.0,
        parameters=whole.parameters,
        experts=whole.experts,
        outside=whole.parameters - kind.blocks * block.parameters,
        blocks=kind.blocks,
        saved_bytes=whole.saved_bytes,
        sent=whole.sent,
    )


def _update_seconds(case: PlanningCase, stage: StageTerms) -> tuple[dict[str, float], float]:
    """Return seconds of the update and exposed offload, and offload that overlaps compute.

    The update reads gradients (twice: first for their norm), reads and writes fp32 weights and
    states, and writes narrow weights.
    """
    layout, device = case.layout, case.cluster.device
    dense, experts = shard_counts(case)
    owned = (stage.parameters - stage.experts) / dense + stage.experts / experts
    # Tensors are updated one by one; a block has about as many as it has products.
    each_bytes = 4 * owned / max(1.0, PRODUCTS_PER_BLOCK * stage.blocks)
    memory = interpolate_ladder(device.stream_ladder, each_bytes, device.stream_bytes_per_s)
    per_element = 8 + 2 * (4 + case.optimizer_bytes) + case.model.element_bytes
    host = case.cluster.host_bytes_per_s or HOST_BYTES_PER_S
    saved = stage.saved_bytes * case.micro_batch / layout.cp
    found = copies_of_offload(case, owned, saved, owned * per_element / memory, host)
    waits = {"optimizer": found.optimizer_s}
    if found.offload_s:
        waits["offload"] = found.offload_s
    return waits, found.beside_s
