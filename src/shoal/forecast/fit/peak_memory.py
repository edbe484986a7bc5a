"""Peak memory of one rank in a step, and its parts.

    peak = (states + largest temporary bytes of an instant + idle pools) · allocator + context

    loss      saved activations of every micro-batch in flight + the loss + gathered weights
    backward  the same without the loss, + the backward of one block: recomputed activations,
              gradients in flight, gathered weights and inputs
    update    states + temporary bytes of the optimizer's step

The fullest of the first, second and last stage counts: the stages between keep fewer micro-batches
and have neither embedding nor head. Sources: Korthikanti et al. 2022 (2205.05198); Narayanan et al.
2021 (2104.04473); Rajbhandari et al. 2020 (1910.02054); of each framework: `frameworks`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal.base.errors import PlanError, check_choice
from shoal.base.estimates.estimate import MemoryEstimate, PlanningCase
from shoal.base.layouts.policies import RECOMPUTE
from shoal.forecast.memory.activations import (
    ActivationBytes,
    activation_shares,
    predict_activations,
    waiting_head_bytes,
)
from shoal.forecast.memory.bytes_in_flight import (
    blockwise_moments,
    bytes_in_flight,
    gathers_on_gloo,
    gloo_moments,
    incoming_gradient_bytes,
    is_blockwise,
)
from shoal.forecast.memory.framework_memory import FrameworkMemory, framework_memory
from shoal.forecast.memory.model_states import (
    WIDTHS,
    ModelStateBytes,
    ParameterElements,
    predict_state_bytes,
)
from shoal.forecast.memory.offloaded_bytes import (
    device_bytes,
    is_offloaded,
    offloaded_bytes,
    streams_parameters,
)
from shoal.forecast.memory.placed_bytes import placed_state_bytes
from shoal.forecast.memory.transient_memory import (
    CHUNK_BYTES,
    ShardedBytes,
    block_share,
    frozen_bytes,
    head_share,
    heap_hole_bytes,
    idle_bytes,
    local_elements,
    loss_bytes,
    persistent_bytes,
    segment_bytes,
    sharded_bytes,
    sum_rank_elements,
    update_bytes,
    wide_elements,
    workspace_bytes,
)
from shoal.planning.pipeline_bubble import micro_batches_in_flight
from shoal.planning.pipeline_stages import StageUnits, is_block, stage_units

LOSSES = ("full", "chunked", "parallel")
UNSURE, UNSURE_LONG, LONG_TOKENS = 0.09, 0.13, 131072
"""Half-width of the interval as a share of the peak, of samples of up to so many tokens and longer
ones: the errors of all published runs lie inside (docs/proof/planner-memory.md)."""


class _StepMoment(NamedTuple):
    """Bytes alive at one moment of a step, besides weights and optimizer state.

    Attributes:
        when: "loss", "backward" or "update".
        made: share of the gradients that exists, 0 … 1.
        gathered: bytes of gathered weights.
        buckets: bytes of gradients in flight.
        activations, loss: bytes of saved activations, and of the loss.
        working: bytes of temporary tensors.
    """

    when: str
    made: float
    gathered: float = 0.0
    buckets: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    working: float = 0.0

    @property
    def size(self) -> float:
        """Return the sum of all parts but the gradients."""
        return self.gathered + self.buckets + self.activations + self.loss + self.working


def predict_memory(
    case: PlanningCase, stage: int | None = None, habits: FrameworkMemory | None = None
) -> MemoryEstimate:
    """Predict the peak memory of the fullest rank in a step, or of pipeline rank `stage`.

    Args:
        stage: −1: the last; None: the fullest of first, second and last, and of those where the
            kind of block changes.
        habits: memory of the framework's step; None: that of `frameworks` for case.framework.

    Returns:
        Parts that sum to the peak, without those of 0, and its interval [low, high]. Weights,
        gradients, optimizer, gathered, buckets, activations, loss and working are allocated.
        allocator is reserved beside them; context is what the device needs outside torch's
        allocator. For other instants of a run: `instants.predict_run`.

    Raises:
        PlanError: unknown policy, schedule or framework, or more stages than blocks.

    >>> from shoal.base.estimates.cluster import Cluster, Device, Link
    >>> from shoal.base.layouts.layout import Layout
    >>> from shoal.base.plans.plan import Plan
    >>> from shoal.forecast.models.published_models import published_shape
    >>> from shoal.forecast.models.transformer_costs import transformer_facts
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 8, link, link)
    >>> model = transformer_facts(published_shape("llama-3-8b"), 8192, 2)
    >>> plan = Plan(Layout(dp_shard=8, zero=3), 8, 1, compute="bf16")
    >>> found = predict_memory(PlanningCase(model, node, plan))
    >>> round(found.parts["weights"] / 2**30, 2), found.when
    (3.74, 'loss')
    """
    _check(case)
    if case.layout.threads > 1 and case.cluster.device.kind != "cpu":
        from shoal.forecast.time.replica_costs import first_device_case, first_device_estimate

        return first_device_estimate(case, predict_memory(first_device_case(case), stage, habits))
    habits = habits or framework_memory(case.framework)
    found = [_estimate(case, habits, stage_units(case, i)) for i in _candidate_ranks(case, stage)]
    fullest = max(found, key=lambda estimate: estimate.peak_bytes)
    waits = offloaded_bytes(case, local_elements(case, _largest_elements(case, fullest.stage)))
    return replace(fullest, host_bytes=waits.host_bytes, disk_bytes=waits.disk_bytes)


def _largest_elements(case: PlanningCase, rank: int) -> ParameterElements:
    stage = stage_units(case, rank)
    return sum_rank_elements(case, stage.units, stage.tied)


def _check(case: PlanningCase) -> None:
    for where, got, allowed in (
        ("memory.recompute", case.plan.recompute, RECOMPUTE),
        ("loss", case.loss, LOSSES),
        ("precision.compute", case.plan.compute, WIDTHS),
        ("memory.offload", case.plan.offload, ("none", "optimizer", "parameters", "activations")),
    ):
        check_choice(where, got, allowed, kind=PlanError)


def _candidate_ranks(case: PlanningCase, stage: int | None) -> list[int]:
    """Return candidates for the fullest rank: both ends, and each change of the kind of block."""
    ranks = case.layout.pp
    if stage is not None:
        return [stage % ranks]
    found = {0, min(1, ranks - 1), ranks - 1}
    blocks = [unit for unit in case.model.units if is_block(unit)]
    if len(blocks) > 1 and ranks > 1:
        total, before = sum(unit.count for unit in blocks), 0
        for unit in blocks[:-1]:
            before += unit.count
            place = before * ranks // total
            found |= {r for r in range(place - 1, place + 3) if 0 <= r < ranks}
    return sorted(found)


def _estimate(case: PlanningCase, habits: FrameworkMemory, stage: StageUnits) -> MemoryEstimate:
    elements = sum_rank_elements(case, stage.units, stage.tied)
    weights, gradients, optimizer = _stage_states(case, stage, elements)
    sharded = sharded_bytes(case, stage)
    streamed = device_bytes(case, stage, elements)
    optimizer += streamed.staying
    if streams_parameters(case):
        weights, sharded = (
            streamed.weights,
            ShardedBytes(streamed.gathered, block=streamed.gradients),
        )
    if gathers_on_gloo(case):
        instants = _step_moments_on_gloo(case, habits, stage, elements)
    else:
        instants = _step_moments(case, habits, stage, elements, sharded, streamed.pieces)
    best = max(instants, key=lambda instant: instant.size + instant.made * gradients)
    parts = {
        "weights": weights,
        "gradients": best.made * gradients,
        "optimizer": optimizer,
        "gathered": best.gathered,
        "buckets": best.buckets,
        "activations": best.activations,
        "loss": best.loss,
        "working": best.working,
    }
    allocated = sum(parts.values())
    idle = idle_bytes(case, habits, stage, best.when, sharded)
    if case.layout.zero == 3 and case.cluster.device.kind != "cpu":
        # made on a separate stream, whose pool stays reserved
        idle += (1 - best.made) * gradients
    parts["allocator"] = idle + (_reserved_ratio(case, habits) - 1) * (allocated + idle)
    most = max(instant.size for instant in instants)
    counted = best.size + best.made * gradients
    kept = bytes_in_flight(case, elements).kept
    parts["allocator"] += heap_hole_bytes(case, counted, most, gradients, kept)
    parts["context"] = case.cluster.device.reserved_bytes
    return _finish(case, parts, allocated, best.when, stage.rank)


def _stage_states(
    case: PlanningCase, stage: StageUnits, elements: ParameterElements
) -> ModelStateBytes:
    """Return the bytes that stay from step to step: from the plan's placements, else by units."""
    plan, layout = case.plan, case.layout
    if plan.placements and not is_offloaded(case) and case.framework == "shoal":
        ranks = {stage.rank * (layout.processes // layout.pp)}
        ranks |= {layout.processes - 1} if layout.serves else set()  # the one with most tables
        return max(
            (placed_state_bytes(plan, rank, case.optimizer_bytes) for rank in ranks), key=sum
        )
    wide = wide_elements(case, stage)
    if layout.serves:
        from shoal.forecast.time.server_costs import table_elements

        tables = table_elements(case)  # a worker holds the rest, a server its columns
        there = tables / layout.servers
        on_server = predict_state_bytes(case, ParameterElements(there, 0.0), there)
        rest = elements._replace(dense=elements.dense - tables)
        on_worker = predict_state_bytes(case, rest, max(0.0, wide - tables))
        found = max(on_server, on_worker, key=sum)
    else:
        found = predict_state_bytes(case, elements, wide)
    return found._replace(weights=found.weights + frozen_bytes(case, stage))


def _step_moments(
    case: PlanningCase,
    habits: FrameworkMemory,
    stage: StageUnits,
    elements: ParameterElements,
    sharded: ShardedBytes,
    pieces: float,
) -> list[_StepMoment]:
    """List moments of a step that may be its memory peak.

    Args:
        habits: measured memory constants of the framework.
        pieces: bytes of offloaded state in the update.
    """
    held = predict_activations(case, habits, stage)
    way = bytes_in_flight(case, elements)
    carried = persistent_bytes(case, habits)
    fresh = _starts_without_gradients(case)
    begun, ended = (head_share(case, stage, elements), 1 - block_share(case, stage, elements))
    sent = sharded.block + sharded.head
    # A tied head's gradient waits for the embedding's; others are added to the kept gradients.
    tied = stage.head is not None and stage.head.tied_to and case.layout.zero < 3
    waiting = waiting_head_bytes(case, stage) if tied else 0.0
    working = (
        carried + held.working + waiting + (0.0 if fresh else incoming_gradient_bytes(case, stage))
    )
    workspace = workspace_bytes(case, habits)
    updating = workspace + update_bytes(case, habits, elements)
    first = held.kept - held.head + held.waiting + held.again
    last = _first_block_activations(case, held, stage)
    loss = loss_bytes(case, habits, stage)
    made = 0.0 if fresh else 1.0
    begun, ended = max(made, begun), max(made, ended)
    in_turn = is_blockwise(case)
    gathered = sharded.gathered
    if in_turn:  # blocks were sharded again
        gathered = sharded.stays + (sharded.last if habits.keeps_last else 0.0)
    instants = [
        _StepMoment("loss", made, gathered, way.before, held.kept, loss, carried),
        _StepMoment("backward", 1.0, buckets=way.sent),
        _StepMoment("backward", 1.0, buckets=sharded.root, working=workspace),
        _StepMoment("update", 1.0, buckets=way.kept, working=updating + pieces),
        _StepMoment("update", 1.0, way.published),
    ]
    if not in_turn:
        return [
            *instants,
            _StepMoment("backward", begun, gathered, sent + way.first, first, 0.0, working),
            _StepMoment("backward", ended, gathered, sent + way.last, last, 0.0, working),
        ]
    for begun, passing in _backward_shares(case, stage, made):
        for turn in blockwise_moments(case, habits, stage, sharded):
            share = max(begun, turn.made)
            again = held.again if turn.again else 0.0
            kept = max(0.0, (first - held.again) * passing - turn.freed) + again
            beside = working if turn.works else carried
            instants.append(
                _StepMoment("backward", share, turn.gathered, turn.sent, kept, 0.0, beside)
            )
    return instants


def _backward_shares(
    case: PlanningCase, stage: StageUnits, made: float
) -> list[tuple[float, float]]:
    """Return (share of gradients present, share of activations in flight) at a backward's start.

    If a pipeline has all micro-batches in flight, none has had its backward.
    """
    flying = 1.0
    if case.layout.pp > 1:
        flying = micro_batches_in_flight(case.schedule, case.layout.pp, case.accumulate, stage.rank)
    if flying == 1 or flying < case.accumulate:
        return [(made, 1.0)]
    return [(0.0, 1.0), (1.0, 1 - 1 / flying)]


def _step_moments_on_gloo(
    case: PlanningCase, habits: FrameworkMemory, stage: StageUnits, elements: ParameterElements
) -> list[_StepMoment]:
    """List moments of a step that may be its memory peak under zero 3 with gloo.

    Args:
        habits: measured memory constants of the framework.
        stage: the units of this pipeline stage.
        elements: parameter elements of the stage.

    Returns:
        the loss, the start of backward, the update, and each block's gather or send.
    """
    held = predict_activations(case, habits, stage)
    way = gloo_moments(case, stage)
    made = 0.0 if _starts_without_gradients(case) else 1.0
    instants = [
        _StepMoment("loss", made, way.loss, 0.0, held.kept, loss_bytes(case, habits, stage)),
        _StepMoment("backward", 1.0, buckets=way.root),
        _StepMoment("update", 1.0, working=update_bytes(case, habits, elements)),
    ]
    for moment in way.blocks:
        kept = max(0.0, held.kept - held.head - moment.through * held.block)
        again, working = (held.again, held.working) if moment.works else (0.0, 0.0)
        instants.append(
            _StepMoment("backward", made, moment.gathered, moment.sent, kept + again, 0.0, working)
        )
    return instants


def _starts_without_gradients(case: PlanningCase) -> bool:
    """Return whether a step begins without gradients: one micro-batch, no gradient buffers kept.

    Several processes keep them in the reducer, and narrow gradients are added to kept fp32 ones.
    """
    alone = case.layout.processes == 1 and WIDTHS[case.plan.compute] >= 4
    return case.accumulate == 1 and (case.layout.zero == 3 or alone)


def _finish(
    case: PlanningCase, parts: dict[str, float], allocated: float, when: str, stage: int
) -> MemoryEstimate:
    peak = sum(parts.values())
    unsure = UNSURE if case.model.sequence <= LONG_TOKENS else UNSURE_LONG
    return MemoryEstimate(
        parts={name: size for name, size in parts.items() if size},
        peak_bytes=peak,
        allocated_bytes=allocated,
        when=when,
        stage=stage,
        low_bytes=peak * (1 - unsure),
        high_bytes=peak * (1 + unsure) + segment_bytes(case),
    )


def _first_block_activations(case: PlanningCase, held: ActivationBytes, stage: StageUnits) -> float:
    """Return the activations during the first block's backward: its own, and those before it."""
    by = activation_shares(case)
    first = stage.units[0][0]
    before = 0.0 if is_block(first) else first.saved_plain_bytes * by.plain
    return held.block + before


def _reserved_ratio(case: PlanningCase, habits: FrameworkMemory) -> float:
    """Return reserved / allocated memory, as measured on the machine, else of the framework."""
    measured = case.cluster.calibration.allocator
    if measured != 1.0 or case.cluster.device.kind == "cpu":
        return measured
    return habits.allocator


MOST_AT_ONCE = 16
"""Training micro-batches that a validation runs at once: beyond, launches cost little."""


def validation_micro_batch(case: PlanningCase, estimate: MemoryEstimate) -> int:
    """Choose the samples per forward pass of a validation that fit a training step's peak.

    The result is a multiple of the training micro-batch, 1 to 16 times it. It is the micro-batch
    itself if the room is unknown (zero 3 at a peak that holds no gathered weights).

        room    = a step's peak − weights − gradients − optimizer state − gathered weights
        sample  = what the largest unit would keep for a backward, its input and its output: without
                  gradients only one unit's activations are alive at a time, and nothing is kept
        at once = room ÷ sample, in whole micro-batches of training

    A unit keeps more for a backward than its forward holds, so the error is on the safe side.
    Counting the unit whole where tensor parallelism splits it is safe too.

    Args:
        estimate: `predict_memory(case)`.

    >>> from shoal.base.estimates.cluster import Cluster, Device, Link
    >>> from shoal.base.layouts.layout import Layout
    >>> from shoal.base.plans.plan import Plan
    >>> from shoal.forecast.models.published_models import published_shape
    >>> from shoal.forecast.models.transformer_costs import transformer_facts
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 8, link, link)
    >>> plan = Plan(Layout(tp=8), 16, 2, compute="bf16")
    >>> case = PlanningCase(transformer_facts(published_shape("llama-3-8b"), 8192, 2), node, plan)
    >>> validation_micro_batch(case, predict_memory(case))
    12
    """
    states = ("weights", "gradients", "optimizer", "gathered")
    room = estimate.allocated_bytes - sum(estimate.parts.get(name, 0.0) for name in states)
    units = case.model.units
    sample = max(u.saved_split_bytes + u.saved_plain_bytes + 2 * u.input_bytes for u in units)
    loss = max(u.loss_bytes for u in units)
    # With gathered parameters, the peak of an update does not bound a forward's gathered weights.
    blind = case.layout.zero == 3 and not estimate.parts.get("gathered")
    if blind or sample <= 0:
        return case.micro_batch
    fit = room / (sample + loss)
    if case.loss == "chunked":  # at most one chunk of logits exists
        chunk = CHUNK_BYTES["cpu" if case.cluster.device.kind == "cpu" else "gpu"]
        fit = max(fit, (room - chunk) / sample)
    times = int(fit // case.micro_batch)
    return case.micro_batch * min(max(times, 1), MOST_AT_ONCE)
