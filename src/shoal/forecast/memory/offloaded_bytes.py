"""Offload: bytes on the device, the host and disks, and seconds of copies in a step.

    optimizer    on the device: 3 pieces of the state during a step
    parameters   of one device: weights outside blocks, 3 blocks, 3 buckets of gradients; during the
                 update 3 pieces of masters, gradients and state. Under fsdp as in FSDP2: only
                 gathered weights
    files        of a run on the CPU: no memory of the process, bytes of a disk

    step         copies in, arithmetic and copies out overlap, one piece behind the other
                 = longest of the three + the first piece in + the last piece out
    passes       weights in twice per micro-batch, gradients out (from the second micro-batch on
                 also in) beside compute; the host scales sums, which reads and writes them

Source: shoal.parallel.offload, which takes its piece size from here. The order of the copies is
executed in tests/parallel/test_copy_overlap.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.base.estimates.estimate import PlanningCase
from shoal.forecast.memory.model_states import WIDTHS, ParameterElements
from shoal.forecast.memory.placed_bytes import stepped_bytes
from shoal.forecast.memory.transient_memory import (
    block_share,
    gathered_elements,
    local_elements,
    sum_rank_elements,
)
from shoal.planning.gradient_buckets import BUCKET_BYTES
from shoal.planning.pipeline_stages import StageUnits, is_block

PIECE_BYTES = 64 * 2**20
"""Bytes of parameters that are stepped together on a large device."""

LEAST_BYTES = 2**16
"""Smaller state tensors stay on the device (biases, step counts): their copies cost more."""

PIECES = 3
"""Pieces on the device at once: one arrives, one is stepped, one leaves."""

PIECES_OF_MEMORY = 64
"""Least number of pieces whose parameters would fit in a device's memory."""

BLOCKS, BUCKETS = 3, 3
"""Blocks whose weights, and buckets whose gradients, are on the device at once."""


def piece_bytes(memory_bytes: float) -> int:
    """Return the bytes of parameters that are stepped together on a device with this memory.

    >>> piece_bytes(24 * 2**30) // 2**20, piece_bytes(2**28) // 2**20
    (64, 4)
    """
    return int(min(PIECE_BYTES, memory_bytes / PIECES_OF_MEMORY))


def is_offloaded(case: PlanningCase) -> bool:
    """Return whether offload moves any tensor of a case; on a CPU only to files."""
    on_gpu = case.cluster.device.kind == "gpu"
    return case.plan.offload != "none" and (on_gpu or case.plan.states_in_files)


def streams_parameters(case: PlanningCase) -> bool:
    """Return whether a single device trains a model whose parameters lie on the host."""
    on_gpu = case.cluster.device.kind == "gpu"
    alone = case.layout.processes == 1 and case.framework == "shoal"
    return case.plan.offloads_parameters and on_gpu and alone


class StreamedBytes(NamedTuple):
    """Bytes on a device under offload: in the whole step, in passes, in the optimizer's step.

    Attributes:
        staying: optimizer state in tensors that are too small to offload.
    """

    weights: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    pieces: float = 0.0
    staying: float = 0.0


def cut_pieces(sizes: Sequence[int], size_bytes: int) -> list[slice]:
    """Cut parameters of these bytes, in their order, into pieces that are stepped together.

    >>> cut_pieces([3, 2, 4, 9, 1], 5)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    ends, room = [0], 0
    for place, size in enumerate(sizes):
        if place > ends[-1] and room < size:
            ends.append(place)
        room = (room if place > ends[-1] else size_bytes) - size
    ends += [len(sizes)] if sizes else []
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _most_resident_bytes(sizes: Sequence[int], pieces: Sequence[slice]) -> float:
    """Return the most bytes of `PIECES` consecutive pieces."""
    held = [sum(sizes[piece]) for piece in pieces]
    return max((sum(held[k : k + PIECES]) for k in range(len(held))), default=0.0)


def device_bytes(
    case: PlanningCase, stage: StageUnits, elements: ParameterElements
) -> StreamedBytes:
    """Return the bytes on the device of states that lie on the host."""
    if (
        not is_offloaded(case)
        or case.plan.offload == "activations"
        or case.cluster.device.kind != "gpu"
    ):
        return StreamedBytes()
    wide = max(4, WIDTHS[case.plan.compute])
    moments = case.optimizer_bytes * wide / 4
    # Elements that this rank steps: under zero 1 to 3 its part of every tensor.
    loose = [
        (unit, local_elements(case, sum_rank_elements(case, [(unit, 1.0)])))
        for unit, _ in stage.units
        if not is_block(unit)
    ]
    largest = max((size for _, size in loose), default=0.0)  # in most models the largest tensor
    piece = piece_bytes(case.cluster.device.memory_bytes) / wide
    own = local_elements(case, elements)
    # A tensor larger than a piece is its own piece; its neighbours are of normal size.
    pieces = moving = min(own, max(piece, largest) + (PIECES - 1) * piece)
    staying = 0.0
    if case.plan.placements and case.framework == "shoal":
        sizes = stepped_bytes(case.plan, stage.rank * (case.layout.processes // case.layout.pp))
        cuts = cut_pieces(sizes, piece_bytes(case.cluster.device.memory_bytes))
        large = [size if size >= LEAST_BYTES else 0 for size in sizes]
        pieces, moving = (
            _most_resident_bytes(sizes, cuts) / wide,
            _most_resident_bytes(large, cuts) / wide,
        )
        staying = (sum(sizes) - sum(large)) / wide * moments
    if not streams_parameters(case):
        if case.plan.offload != "optimizer":  # FSDP2: the host steps
            return StreamedBytes()
        return StreamedBytes(pieces=moving * moments, staying=staying)
    width = WIDTHS[case.plan.compute]
    blocks, root = gathered_elements(case, stage)
    if not blocks:
        root = own
    # Tables stay wide: weights that no product reads have no narrow copy.
    table = sum(size for unit, size in loose if not unit.forward_flops and not unit.loss_bytes)
    kept = width * max(0.0, root - table) + wide * table
    block = max(blocks, default=0.0) or own * block_share(case, stage, elements)
    return StreamedBytes(
        weights=kept,
        gathered=width * min(BLOCKS, max(1, len(blocks))) * block,
        gradients=min(wide * own, max(BUCKET_BYTES, wide * largest) + (BUCKETS - 1) * BUCKET_BYTES),
        pieces=pieces * (2 * wide + (width if width < wide else 0)) + moving * moments,
        staying=staying,
    )


class CopySeconds(NamedTuple):
    """Seconds of a whole step: exposed copies, and copies that overlap compute."""

    optimizer_s: float
    offload_s: float
    beside_s: float


def predict_copies(
    case: PlanningCase, owned: float, saved_bytes: float, update_s: float, host_bytes_per_s: float
) -> CopySeconds:
    """Predict the seconds that offload adds to a step.

    Args:
        owned: elements that this rank steps.
        saved_bytes: of activations per micro-batch.
        update_s: seconds of the optimizer's arithmetic on the device.

    >>> from shoal.base.estimates.cluster import Cluster, Device, Link
    >>> from shoal.base.estimates.estimate import ModelFacts
    >>> from shoal.base.layouts.layout import Layout
    >>> from shoal.base.plans.plan import Plan
    >>> link = Link("wire", 0, 1)
    >>> one = Cluster(Device("d", 24e9, {}, 1e12), 1, 1, link, link)
    >>> plan = Plan(Layout(), 1, 1, compute="bf16", offload="optimizer")
    >>> found = predict_copies(
    ...     PlanningCase(ModelFacts("m", (), 1, 2, 0), one, plan), 1e9, 0.0, 0.02, 25e9
    ... )
    >>> round(found.optimizer_s + found.offload_s, 2)  # 8 bytes each way at once
    0.33
    """
    wide = max(4, WIDTHS[case.plan.compute])
    moments = case.optimizer_bytes * wide / 4
    width, rounds = WIDTHS[case.plan.compute], case.accumulate
    if not is_offloaded(case) or case.cluster.device.kind != "gpu":
        return CopySeconds(update_s, 0.0, 0.0)
    if case.plan.offload == "activations":
        return CopySeconds(update_s, 0.0, 2 * rounds * saved_bytes / host_bytes_per_s)
    if case.plan.offloads_parameters and not streams_parameters(case):  # FSDP2: the host steps
        return CopySeconds(
            update_s, 0.0, 2 * rounds * owned * case.model.element_bytes / host_bytes_per_s
        )
    narrow = width if width < wide else 0
    streams = streams_parameters(case)
    in_bytes = owned * (moments + (2 * wide if streams else 0))
    out_bytes = owned * (moments + (wide + narrow if streams else 0))
    in_s, out_s = in_bytes / host_bytes_per_s, out_bytes / host_bytes_per_s
    share = min(1.0, piece_bytes(case.cluster.device.memory_bytes) / max(1.0, wide * owned))
    whole_s = max(in_s, update_s, out_s) + share * (in_s + out_s)
    beside_s = 0.0
    if streams:
        weights = rounds * owned * width
        back = weights + (rounds - 1) * owned * wide
        beside_s = (weights + max(back, rounds * owned * wide)) / host_bytes_per_s
        whole_s += 2 * owned * wide / host_bytes_per_s
    return CopySeconds(update_s, whole_s - update_s, beside_s)


class OffloadedBytes(NamedTuple):
    """Bytes of one rank's states on the host, and in files."""

    host_bytes: float = 0.0
    disk_bytes: float = 0.0


def offloaded_bytes(case: PlanningCase, elements: float) -> OffloadedBytes:
    """Return the offloaded bytes of a rank that steps this many elements."""
    if not is_offloaded(case) or case.plan.offload == "activations":
        return OffloadedBytes()
    wide = max(4, WIDTHS[case.plan.compute])
    width = WIDTHS[case.plan.compute]
    each = case.optimizer_bytes * wide / 4
    if case.plan.offloads_parameters:
        each += 2 * wide + (width if width < wide else 0)
    amount = elements * each
    return OffloadedBytes(0.0, amount) if case.plan.states_in_files else OffloadedBytes(amount, 0.0)
