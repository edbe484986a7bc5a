"""What one optimizer step makes the ranks do, in seconds of plain arithmetic: no efficiency yet.

A step is cut into *terms*, each the time that a perfect machine would take (FLOP / peak rate, bytes
/ bandwidth, the α–β time of a collective, a count of events). `step_time.py` multiplies them by the
machine's calibration, lets what runs at once hide what it hides, and adds them up.

Per micro-batch and pipeline stage: the work of the units (step_work.py) and what ranks exchange
meanwhile (step_parts.py).
Per step: what data parallelism sends (step_sync.py), and the two copies of dualpipe to each other;
optimizer (bytes of states, gradients and weights / bytes per second), offload, step (one event). A
collective's term ends in how its group lies in the nodes (`_shared`, `_across`, `_both`:
collective_time.py), since each way has an efficiency of its own.
The layout of stages follows Narayanan et al. 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.base.estimates.estimate import Case, UnitFacts
from shoal.base.layouts.schedule_names import canonical, copies
from shoal.forecast.memory.model_states import Elements, shard_counts
from shoal.forecast.memory.offloaded_bytes import copies as copies_of_offload
from shoal.forecast.time.collective_time import Cost, Group, all_reduce, group_of
from shoal.forecast.time.framework_overlap import Habits, habits_of
from shoal.forecast.time.step_parts import (
    Part,
    between_stages,
    block_exchanges,
    end_exchange,
    units_part,
)
from shoal.forecast.time.step_sync import Sync, data_sync, gradient_bytes
from shoal.forecast.time.step_work import PRODUCTS_PER_BLOCK, on_ladder
from shoal.planning.pipeline_stages import root_share

HOST_BYTES_PER_S = 20e9
"""Between device and host where the cluster does not say: PCIe 4.0 x16, in practice."""


@dataclass(frozen=True)
class Stage:
    """One kind of pipeline stage.

    Attributes:
        copies: stages of this kind.
        fullest: the most blocks of one / their mean.
        device: term → seconds of one micro-batch.
        launch_s: in the host's lane beside it.
        forward, again: shares of the compute that are the forward pass, and what recompute runs.
        parameters: elements that one of its ranks holds before data-parallel splits.
        experts: of them, in experts.
        outside: of them, in no block.
        blocks: in it.
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
    sent: Cost


@dataclass(frozen=True)
class StepTerms:
    """A case as terms.

    Attributes:
        stages: kinds of stages, first to last.
        sync: what data parallelism sends.
        step: terms that happen once.
        beside_s: offload that travels beside compute.
        sent: link → bytes per step of a rank of the stage that holds most.
    """

    case: Case
    habits: Habits
    stages: tuple[Stage, ...]
    sync: Sync
    step: dict[str, float]
    beside_s: float
    sent: dict[str, float]


def step_terms(case: Case) -> StepTerms:
    """The terms of a case.

    Raises:
        PlanError: for a number format, a recompute policy or a framework that is not known.
    """
    habits = habits_of(case.framework)
    before, inner, after = _split(case.model.units)
    count = sum(unit.count for unit in inner)
    unit = max(inner, key=lambda each: each.count)
    block = units_part(case, habits, inner, True).times(1 / count) + block_exchanges(
        case, habits, unit
    )
    between = between_stages(case, habits, unit)
    end = end_exchange(case, unit)
    ends = (
        units_part(case, habits, before, False) + end,
        units_part(case, habits, after, False) + end,
    )
    stages = tuple(_stage(kind, block, ends, between) for kind in _kinds(case.layout.pp, count))
    held = copies(canonical(case.schedule)) if case.layout.pp > 1 else 1
    full = _times(max(stages, key=lambda stage: stage.parameters), held)
    one = Elements(block.parameters - block.experts, block.experts)
    rooted = _rooted(case, inner)
    sync = data_sync(
        case,
        habits,
        full.blocks if rooted < 1 else 0.0,
        Elements(one.dense * (1 - rooted), one.experts * (1 - rooted)),
        full.outside + rooted * full.blocks * sum(one),
    )
    waits_s, beside_s = _update(case, full)
    total = sync.total(case.accumulate) + full.sent.times(case.accumulate)
    if held > 1:
        group, cost = _between_copies(case, habits, full)
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


def _times(stage: Stage, held: int) -> Stage:
    """A stage of a rank that holds several such, one micro-batch at a time."""
    return replace(
        stage,
        parameters=stage.parameters * held,
        experts=stage.experts * held,
        outside=stage.outside * held,
        blocks=stage.blocks * held,
    )


def _between_copies(case: Case, habits: Habits, stage: Stage) -> tuple[Group, Cost]:
    """The sum of a rank's gradients with those of the rank that holds the same stages, once a step.

    The two are 1 to p − 1 stages apart: p/2 on average.
    """
    layout = case.layout
    apart = layout.tp * layout.cp * layout.data_degree * layout.pp // 2
    group = group_of(case.cluster, 2, apart)
    dense, experts = shard_counts(case)
    own = (stage.parameters - stage.experts) / dense + stage.experts / experts
    return group, all_reduce(group, own * gradient_bytes(case, habits))


_Units = list[UnitFacts]


def _split(units: tuple[UnitFacts, ...]) -> tuple[_Units, _Units, _Units]:
    """What comes before the blocks, the blocks, and what comes after; blocks are what repeats."""
    inner = [i for i, unit in enumerate(units) if unit.count > 1]
    if not inner:  # nothing repeats: all but the ends can be cut
        inner = list(range(1, len(units) - 1)) or list(range(len(units)))
    first, last = inner[0], inner[-1]
    return list(units[:first]), list(units[first : last + 1]), list(units[last + 1 :])


class _Kind(NamedTuple):
    """Stages alike: how many, blocks of each on average and at most, embedding, head."""

    copies: int
    blocks: float
    most: float
    first: bool
    last: bool


def _kinds(stages: int, blocks: int) -> list[_Kind]:
    """Blocks dealt in equal runs; what is left over goes to the middle.

    >>> [(kind.copies, kind.blocks, kind.most) for kind in _kinds(4, 10)]
    [(1, 2, 2), (2, 3.0, 3), (1, 2, 2)]
    """
    if stages == 1:
        return [_Kind(1, blocks, blocks, True, True)]
    ends = blocks // stages
    if stages == 2:
        more = blocks - ends
        return [_Kind(1, more, more, True, False), _Kind(1, ends, ends, False, True)]
    left, inner = blocks - 2 * ends, stages - 2
    middle = _Kind(inner, left / inner, -(-left // inner), False, False)
    return [_Kind(1, ends, ends, True, False), middle, _Kind(1, ends, ends, False, True)]


def _rooted(case: Case, inner: Sequence[UnitFacts]) -> float:
    """Share of the weights that repeat which fsdp leaves in the root."""
    whole = sum(unit.parameters * unit.count for unit in inner)
    if case.layout.zero < 3 or not whole:
        return 0.0
    return sum(root_share(unit) * unit.parameters * unit.count for unit in inner) / whole


def _stage(kind: _Kind, block: Part, ends: tuple[Part, Part], between: Part) -> Stage:
    whole = block.times(kind.blocks) + between
    for held, end in zip((kind.first, kind.last), ends, strict=True):
        if held:
            whole += end
    device = dict(whole.terms)
    launch_s = device.pop("launch", 0.0)
    compute = whole.compute_s
    return Stage(
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


def _update(case: Case, stage: Stage) -> tuple[dict[str, float], float]:
    """Seconds of the optimizer's update and of offload that waits; offload beside compute.

    The update reads gradients (twice: their norm is taken first), reads and writes fp32 weights and
    states, and writes narrow weights.
    """
    layout, device = case.layout, case.cluster.device
    dense, experts = shard_counts(case)
    owned = (stage.parameters - stage.experts) / dense + stage.experts / experts
    # Tensors are updated one by one, about as many as a block has products.
    each_bytes = 4 * owned / max(1.0, PRODUCTS_PER_BLOCK * stage.blocks)
    memory = on_ladder(device.stream_ladder, each_bytes, device.stream_bytes_per_s)
    per_element = 8 + 2 * (4 + case.optimizer_bytes) + case.model.element_bytes
    host = case.cluster.host_bytes_per_s or HOST_BYTES_PER_S
    saved = stage.saved_bytes * case.micro_batch / layout.cp
    found = copies_of_offload(case, owned, saved, owned * per_element / memory, host)
    waits = {"optimizer": found.optimizer_s}
    if found.offload_s:
        waits["offload"] = found.offload_s
    return waits, found.beside_s
