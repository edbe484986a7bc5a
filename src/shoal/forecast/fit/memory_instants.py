"""Memory at every instant of a run, on its fullest device and on a node's host.

    checking     tp, cp: a layer of each kind is computed whole and divided, in float64
    building     weights are created or received: a rank's share and the largest unit, whole
    loading      a checkpoint's slices lie on the host and are copied to the device one by one
    proving      the layout, and one process on rank 0, train in float64 with SGD and momentum
    first step   its update creates the optimizer state; later steps hold it from their start
    step         the peak of `memory`
    saving       training continues beside a host copy of what this rank writes
    exporting    `shoal checkpoint export`: the largest tensor, in one process on one host

    device while building   = width · (the rank's share + the largest unit)     zero 3, tp, pp, ep
                              tp, pp, ep without it: at the end the share again, for gradients
                            = width · all elements · 2                          ddp, zero 1, zero 2
                            + width · all elements if the user's module is already on the device
    host while building     = width · the largest unit           one build per machine, in files
                            = ranks · width · all elements       each rank builds, or has, a module
    device while checking   = 8 · (the largest layer + its largest tensor's gradient, under tp its
                              part again) + activations
    host while checking     = ranks · activations       at most: inputs, outputs and gradients
    host while loading      = ranks · (weights + state that a rank keeps)
    host while saving       = ranks · (weights + state) of the model ÷ all ranks, replicas once
    width                   4 bytes, 8 under fp64: narrow copies are made later, bucket by bucket

On a CPU a device's memory is the host's, and all of it counts as the device's. Files are not memory
of a process: what all ranks of a machine map lies once in its page cache. The prediction omits the
proof as the run does, if one process cannot hold it or it would take over 30 s (`proof.quick`).

Source: shoal.parallel.build.shared_build, trainer.parallelize, checkpoint.read,
checkpoint.hostcopy, proof.battery; torch: FSDPParam (_init_sharded_param);
tests/worlds/memory/test_peak.py, test_build.py
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.estimates.estimate import (
    MemoryEstimate,
    MemoryInstant,
    ModelFacts,
    PlanningCase,
    UnitFacts,
)
from shoal.base.plans.batches import proof_batch
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.machines.measured_machine import PROCESS_BYTES
from shoal.forecast.memory.framework_memory import FrameworkMemory
from shoal.forecast.memory.model_states import WIDTHS, shard_counts
from shoal.forecast.memory.offloaded_bytes import streams_parameters
from shoal.forecast.memory.transient_memory import (
    gathered_elements,
    local_elements,
    sum_rank_elements,
)
from shoal.planning.pipeline_stages import StageUnits, is_block, is_layer_unit, stage_units

PROOF_S, PROOF_SHARE = 30.0, 0.5
"""Seconds of a proof in one process, and the share of the float64 rate that it reaches."""

PROOF_STATES = 3
"""Copies of the weights under SGD with momentum: weights, gradients, momentum."""

PROOF_RECORDS = 2 * (2 + 2)
"""Copies of both sides on rank 0: gradients of two steps, the first and last weights."""


def predict_run(case: PlanningCase, habits: FrameworkMemory | None = None) -> MemoryEstimate:
    """Predict the peak of the steps (`predict_memory`) and the bytes at every instant of a run.

    Args:
        habits: as in `predict_memory`.

    Returns:
        The step's estimate with `instants`, in the order in which a run meets them; without them
        for other frameworks.

    Raises:
        PlanError: as in `predict_memory`.

    >>> from shoal.base.estimates.cluster import Cluster, Device, Link
    >>> from shoal.base.layouts.layout import Layout
    >>> from shoal.base.plans.plan import Plan
    >>> from shoal.forecast.models.published_models import published_shape
    >>> from shoal.forecast.models.transformer_costs import transformer_facts
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 8, link, link)
    >>> model = transformer_facts(published_shape("llama-3-70b"), 8192, 2)
    >>> fsdp = PlanningCase(model, node, Plan(Layout(dp_shard=8, zero=3), 8, 1, compute="bf16"))
    >>> def building(case):
    ...     one = next(i for i in predict_run(case).instants if i.name == "building")
    ...     return one.name, round(one.device_bytes / 2**30), round(one.host_bytes / 2**30)
    >>> building(fsdp)
    ('building', 41, 7)
    >>> building(replace(fsdp, handed="host"))
    ('building', 41, 2106)
    >>> building(fsdp.but(layout=Layout(tp=8)))
    ('building', 66, 7)
    """
    step = predict_memory(case, None, habits)
    if case.framework != "shoal":
        return step
    found = [
        *_predict_checking(case),
        _predict_building(case),
        _predict_loading(case),
        *_predict_proving(case, habits),
        _predict_first_step(case, step),
        MemoryInstant("step", step.peak_bytes, _offloaded_bytes(case, step)),
        _predict_saving(case, step),
        _predict_exporting(case),
    ]
    return replace(step, instants=tuple(_add_resident(case, one) for one in found))


def _add_resident(case: PlanningCase, one: MemoryInstant) -> MemoryInstant:
    """Add the bytes that exist at any instant; on a CPU the host's bytes are the device's."""
    if one.name == "exporting":  # a separate process without devices
        return replace(one, host_bytes=one.host_bytes + PROCESS_BYTES)
    context = 0.0 if one.name in STEPS else case.cluster.device.reserved_bytes
    device = one.device_bytes + context
    if case.cluster.device.kind == "cpu":
        return replace(one, device_bytes=device + one.host_bytes / local_ranks(case), host_bytes=0)
    return replace(
        one, device_bytes=device, host_bytes=one.host_bytes + local_ranks(case) * PROCESS_BYTES
    )


STEPS = ("first step", "step", "saving")
"""Instants whose device bytes come from a step's estimate, which counts the CUDA context."""


def local_ranks(case: PlanningCase) -> int:
    """Return the ranks of the fullest node, which share its memory."""
    return max(1, min(case.cluster.per_node, case.layout.processes))


LOOKED_AT, SHORT = 3, 256
"""Samples of a layout check, and under cp their tokens (`trainer.sample_forward`)."""


def _predict_checking(case: PlanningCase) -> list[MemoryInstant]:
    """Return the check of one layer of each kind, whole and divided, before sharding.

    The weights lie on the host. A model without repeated layers counts as one layer, unless a
    pipeline cuts it.
    """
    if case.layout.tp * case.layout.cp == 1:
        return []
    layers: dict[str, list[UnitFacts]] = {}
    alone = all(u.block == "-" or not is_block(u) for u in case.model.units)
    together = alone and case.layout.pp == 1
    for unit in case.model.units:
        if is_block(unit) and (alone or unit.block != "-"):
            part_of = unit.name if unit.block in ("", "-") else unit.block
            layers.setdefault("" if together else part_of, []).append(unit)
    samples = float(min(LOOKED_AT, case.micro_batch))
    if case.layout.cp > 1 and case.model.sequence:
        samples *= min(1.0, SHORT / case.model.sequence)
    most = most_host = 0.0
    held = 1.0 + (1.0 / case.layout.tp if case.layout.tp > 1 else 0.0)
    for units in layers.values():
        often = [(u, u.count if together or u.block not in ("", "-") else 1) for u in units]
        whole = sum(n * (u.parameters + u.frozen_parameters) for u, n in often)
        largest = max(_largest_matrix(u) for u in units)
        kept = sum(n * (u.saved_split_bytes + u.saved_plain_bytes) for u, n in often)
        kept *= samples * 8 / case.model.element_bytes
        most = max(most, 8.0 * (whole + held * largest) + kept)
        most_host = max(most_host, kept)
    there = whole_elements(case) * _width(case) if case.handed == "device" else 0.0
    if case.cluster.device.kind == "cpu":
        return [MemoryInstant("checking", 0.0, local_ranks(case) * (most + most_host))]
    return [MemoryInstant("checking", there + most, local_ranks(case) * most_host)]


def _largest_matrix(unit: UnitFacts) -> float:
    """Return the elements of a unit's largest tensor: a layer's matrix, or a third of a block's."""
    matrices = unit.parameters - unit.plain_parameters
    return float(matrices if is_layer_unit(unit) else matrices / 3)


def _predict_building(case: PlanningCase) -> MemoryInstant:
    """Return the build: weights are created on the host, and a rank's share moves to its device."""
    width, whole = _width(case), whole_elements(case)
    here = whole if holds_whole(case) else 0.0
    on_cpu = case.cluster.device.kind == "cpu"
    if case.handed == "device" and not on_cpu and not holds_whole(case):
        here += whole
    kept, unit = (
        (_most_local_elements(case), _largest_unit(case)) if is_sharded(case) else (0.0, 0.0)
    )
    ranks, host = local_ranks(case), 0.0
    if on_cpu:  # the built weights stay; a gathered unit counts elsewhere
        host = ranks * width * whole if case.handed != "builder" and is_sharded(case) else 0.0
    elif case.handed == "host" or (case.handed == "builder" and not is_sharded(case)):
        host = ranks * width * whole
    elif case.handed == "builder":  # one unit at a time, on its way into the files
        host = width * unit
    buffers = 0.0  # of gradients, and flat weights under zero 1 and 2
    if case.layout.zero < 3 and case.layout.processes > 1:
        buffers = width * (whole if holds_whole(case) else kept)
    if case.plan.offloads_parameters and case.layout.zero == 3 and not on_cpu:
        host, kept = host + ranks * width * kept, 0.0
    device = width * (here + kept) + max(_whole_unit_bytes(case, unit), buffers)
    return MemoryInstant("building", device, host, files_bytes(case))


def _whole_unit_bytes(case: PlanningCase, unit: float) -> float:
    """Return the bytes of the unit that is whole for a moment, as it comes from the host."""
    if not unit:
        return 0.0
    width = _width(case)
    if case.cluster.device.kind == "cpu":  # already there
        return 0.0
    if case.layout.zero < 3:
        return width * unit
    gathered = [gathered_elements(case, stage) for stage in _end_stages(case)]
    return width * max(max([root, *sizes]) for sizes, root in gathered)


def _predict_loading(case: PlanningCase) -> MemoryInstant:
    """Return the load of a checkpoint: slices on the host, then one by one on the device."""
    state = _checkpoint_bytes(case)
    width = _width(case)
    found = found_host = 0.0
    for stage in _end_stages(case):
        elements = sum_rank_elements(case, stage.units, stage.tied)
        own, whole = local_elements(case, elements), sum(elements)
        weights = own if case.layout.zero == 3 else whole
        buffers = 0.0 if case.layout.zero == 3 else whole  # gradients that stay (`buckets`)
        found = max(found, width * (weights + buffers) + (state - width) * own)
        found_host = max(found_host, state * own)
    largest = width * _largest_tensor(case)
    on_device = found
    if case.plan.offload != "none":
        on_device = 0.0 if is_offloaded_whole(case) else width * _most_local_elements(case)
    elif case.cluster.device.kind == "cpu":  # from then on these bytes are the optimizer's
        on_device -= (state - width) * found_host / state
    return MemoryInstant("loading", on_device + largest, local_ranks(case) * (found_host + largest))


def _predict_proving(case: PlanningCase, habits: FrameworkMemory | None) -> list[MemoryInstant]:
    """Return the proof in float64 before the run, if any: both sides, one after the other."""
    if not case.proves or case.layout.processes == 1:
        return []
    device, whole = case.cluster.device, whole_elements(case)
    batch, micro_batch = proof_batch(case.layout, case.micro_batch)
    samples = batch + micro_batch  # the proof's second step is one micro-batch
    rate = device.matrix_flops_per_s.get("fp64", 0.0) * PROOF_SHARE
    seconds = 3 * case.model.forward_flops * samples / rate if rate else 0.0
    twin = 8 * PROOF_STATES * whole
    if seconds > PROOF_S or twin + device.reserved_bytes > device.memory_bytes:
        return []
    small = replace(case, model=_in_float64(case.model), optimizer_bytes=4).but(
        compute="fp64", micro_batch=micro_batch, batch=batch, average=0.0
    )
    layout = predict_memory(small, None, habits)
    beside = layout.peak_bytes - layout.parts.get("context", 0.0)
    records = 8 * whole * PROOF_RECORDS
    return [MemoryInstant("proving", max(twin, beside), records)]


def _in_float64(model: ModelFacts) -> ModelFacts:
    """Return the same model with activations of 8 bytes an element."""
    times = 8 / model.element_bytes
    units = tuple(
        replace(
            unit,
            saved_split_bytes=unit.saved_split_bytes * times,
            saved_plain_bytes=unit.saved_plain_bytes * times,
            selective_bytes=(unit.selective_bytes[0] * times, unit.selective_bytes[1] * times),
            input_bytes=unit.input_bytes * times,
            working_bytes=unit.working_bytes * times,
            loss_bytes=unit.loss_bytes * times,
        )
        for unit in model.units
    )
    return replace(model, units=units, element_bytes=8)


def _predict_first_step(case: PlanningCase, step: MemoryEstimate) -> MemoryInstant:
    """Return the first step, whose update creates the optimizer state, after the activations."""
    state = step.parts.get("optimizer", 0.0)
    narrow = WIDTHS[case.plan.compute] < 4 and case.layout.zero < 3
    born = state * case.optimizer_bytes / (case.optimizer_bytes + 4) if narrow else state
    staying = sum(step.parts.get(part, 0.0) for part in ("weights", "gradients", "context"))
    before = step.peak_bytes - (born if step.when != "update" else 0.0)
    return MemoryInstant("first step", max(before, staying + state), _offloaded_bytes(case, step))


def _predict_saving(case: PlanningCase, step: MemoryEstimate) -> MemoryInstant:
    """Return the save: training continues beside a host copy of this rank's checkpoint."""
    total = _checkpoint_bytes(case) * float(case.model.trainable)
    copied = total / case.layout.processes * local_ranks(case)
    return MemoryInstant("saving", step.peak_bytes, _offloaded_bytes(case, step) + copied)


def _predict_exporting(case: PlanningCase) -> MemoryInstant:
    """Return the export: one tensor at a time, in a process without devices."""
    return MemoryInstant("exporting", 0.0, _width(case) * _largest_tensor(case))


def _offloaded_bytes(case: PlanningCase, step: MemoryEstimate) -> float:
    """Return the bytes of a node's memory that hold what `memory.offload` moves off devices."""
    if case.plan.offload == "none" or case.cluster.device.kind == "cpu":
        return 0.0
    moved = step.host_bytes
    if case.plan.offload == "activations":
        there = predict_memory(case.but(offload="none")).parts.get("activations", 0.0)
        moved = max(0.0, there - step.parts.get("activations", 0.0))
    return local_ranks(case) * moved


def _checkpoint_bytes(case: PlanningCase) -> float:
    """Return a checkpoint's bytes per trained element: weight, optimizer state, average."""
    width = _width(case)
    return width + case.optimizer_bytes * width / 4 + (width if case.plan.average else 0)


def _end_stages(case: PlanningCase) -> list[StageUnits]:
    """Return the first and last stage: embedding and head make them the fullest."""
    return [stage_units(case, rank) for rank in sorted({0, case.layout.pp - 1})]


def _most_local_elements(case: PlanningCase) -> float:
    """Return the elements of the weights that the fullest rank keeps."""
    dense, experts = shard_counts(case) if case.layout.zero == 3 else (1, 1.0)
    found = 0.0
    for stage in _end_stages(case):
        own = sum_rank_elements(case, stage.units, stage.tied)
        still = sum(unit.frozen_parameters * count for unit, count in stage.units) / case.layout.tp
        found = max(found, (own.dense + still) / dense + own.experts / experts)
    return found


def _largest_unit(case: PlanningCase) -> float:
    """Return the elements of the largest unit, whole, as it is built."""
    return max(float(u.parameters + u.frozen_parameters) for u in case.model.units)


def _largest_tensor(case: PlanningCase) -> float:
    """Return an upper bound of the largest tensor's elements: a table, or a part of a block."""
    tables = [u.parameters for u in case.model.units if u.name in ("embedding", "head")]
    blocks = [u.parameters / 3 for u in case.model.units if u.name not in ("embedding", "head")]
    return float(max([*tables, *blocks], default=0.0))


def _width(case: PlanningCase) -> int:
    return max(4, WIDTHS[case.plan.compute])


def is_sharded(case: PlanningCase) -> bool:
    """Return whether a rank keeps only a part of the weights."""
    layout = case.layout
    return layout.zero == 3 or layout.tp * layout.pp * layout.ep > 1


def holds_whole(case: PlanningCase) -> bool:
    """Return whether a device keeps all weights: ddp, zero 1, zero 2 without offload."""
    return not is_sharded(case) and not is_offloaded_whole(case)


def is_offloaded_whole(case: PlanningCase) -> bool:
    """Return whether a whole model is on the host of one device, or in files."""
    in_files = case.plan.offloads_parameters and case.plan.states_in_files
    return streams_parameters(case) or in_files


def files_bytes(case: PlanningCase) -> float:
    """Return bytes of the files in which each machine builds the model; 0 without files.

    They are memfd files if twice as much stays free beside them, else files in TMPDIR. The latter
    lie in the page cache, which the kernel writes out when memory is short.
    """
    once = case.framework == "shoal" and case.handed == "builder" and is_sharded(case)
    return _width(case) * whole_elements(case) if once else 0.0


def whole_elements(case: PlanningCase) -> float:
    """Return the elements of the whole model, frozen ones included."""
    return float(sum(u.count * (u.parameters + u.frozen_parameters) for u in case.model.units))
