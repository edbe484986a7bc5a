"""Exact bytes and collectives of one rank, from a plan with placements.

A search uses sums over units of a model (`model_states`, `step_sync`). A plan with placements lists
every tensor, so the figures here are exact: a run's counters and its live storages agree to the
byte (tests/worlds/layouts/test_placed.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.base.layouts.resharding import ranks_after_reshard
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Bucket, Plan
from shoal.base.plans.tensor_shards import dtype_bytes
from shoal.forecast.memory.model_states import ModelStateBytes
from shoal.planning.bucket_shards import cut_buckets
from shoal.planning.gradient_buckets import BUCKET_BYTES, plan_buckets


class PlannedCollective(NamedTuple):
    """One collective of a step: all_reduce, reduce_scatter or all_gather.

    Attributes:
        payload_bytes: of the whole reduced or gathered tensor.
        degree: ranks that take part.
    """

    kind: str
    payload_bytes: int
    degree: int


def placed_state_bytes(plan: Plan, rank: int, optimizer_bytes: float) -> ModelStateBytes:
    """Return the bytes that a rank keeps from step to step, by kind.

    Args:
        plan: with its placements, without offload.
        optimizer_bytes: state per fp32 element of the optimizer: 8 for Adam.

    >>> from shoal.base.layouts.layout import Layout
    >>> rows = (Placement("w", (6, 4), "float32", True, data="states"),)
    >>> plan = Plan(Layout(dp_shard=2, zero=2), 4, 2, 1, placements=rows)
    >>> placed_state_bytes(plan, 0, 8)
    ModelStateBytes(weights=96, gradients=48, optimizer=96.0)
    """
    here = _RankPlacements(plan, rank)
    weights = gradients = stepped = 0
    masters = 0
    for row in here.rows.values():
        if row.data == "rows":
            size = here.row_bytes(row)
            weights += size
            gradients += size * row.trains
            stepped += here.unpadded_elements(row) * row.element_bytes * row.trains
        elif not row.trains:
            weights += math.prod(row.local_shape(here.at)) * row.element_bytes
    for bucket in here.buckets:
        row = here.rows[bucket.names[0]]
        if row.data == "rows":
            continue
        own = here.own_elements(bucket) * row.element_bytes
        weights += bucket.elements * dtype_bytes(bucket.compute or bucket.dtype)
        once = row.data == "whole" or plan.layout.zero == 1 or plan.defer_sync
        gradients += bucket.payload_bytes if once else own
        masters += own if bucket.compute else 0
        stepped += own
    if plan.layout.zero == 3 and plan.defer_sync and plan.accumulate > 1:
        gradients += sum(
            math.prod(row.local_shape(here.at)) * row.element_bytes
            for row in here.rows.values()
            if row.data == "rows" and row.trains
        )
    moments = stepped * (optimizer_bytes / 4 + bool(plan.average))
    return ModelStateBytes(weights, gradients, masters + moments)


def gradient_sums(plan: Plan, rank: int) -> Iterator[PlannedCollective]:
    """Yield every collective that sums gradients in one step of a rank, in no order.

    Args:
        plan: with its placements, and `accumulate` micro-batches per rank.
    """
    here, layout = _RankPlacements(plan, rank), plan.layout
    often = 1 if plan.defer_sync else plan.accumulate
    for bucket in here.buckets:
        row = here.rows[bucket.names[0]]
        outer, inner = (row.degree(axis, layout) for axis in row.data_axes)
        if row.data == "rows" or outer * inner == 1:
            continue
        kind = "all_reduce" if row.data == "whole" else "reduce_scatter"
        size = bucket.elements * _sent_bytes(plan, bucket.dtype)
        times = often if row.data == "states" and layout.zero == 2 else 1
        yield from [PlannedCollective(kind, size, outer * inner)] * times
    for unit, rows in here.units().items():
        calls = rows[0].calls if unit else 1
        outer, inner = (rows[0].degree(axis, layout) for axis in rows[0].data_axes)
        elements = sum(here.row_elements(row) for row in rows if row.trains)
        size = elements * inner * _sent_bytes(plan, rows[0].dtype)
        if size:
            yield from [PlannedCollective("reduce_scatter", size, inner)] * (often * calls)
        if size and outer > 1:
            yield from [PlannedCollective("all_reduce", size // inner, outer)] * (often * calls)
    yield from _model_axis_sums(here)


def weight_gathers(plan: Plan, rank: int, per_node: int) -> Iterator[PlannedCollective]:
    """Yield every collective that gathers updated weights in one step of a rank.

    Args:
        per_node: ranks of a node, among which `fsdp.reshard = node` keeps blocks.
    """
    here, layout = _RankPlacements(plan, rank), plan.layout
    for bucket in here.buckets:
        row = here.rows[bucket.names[0]]
        if row.data == "states":
            degree = math.prod(row.degree(axis, layout) for axis in row.data_axes)
            size = bucket.elements * dtype_bytes(bucket.compute or bucket.dtype)
            yield PlannedCollective("all_gather", size, degree)
    for unit, rows in here.units().items():
        inner = rows[0].degree(rows[0].data_axes[1], layout)
        size = sum(here.row_elements(row) for row in rows) * inner * _gathered_bytes(unit, rows)
        # A block before every call, and again before its backward; in a pipeline others stay whole.
        passes = 1 if layout.pp > 1 else plan.accumulate
        if unit:
            passes = plan.accumulate * rows[0].calls
            dealt = layout.ep if rows[0].is_expert else 1
            kept = ranks_after_reshard(plan.reshard, inner, per_node, layout.cp * layout.tp * dealt)
            yield from [PlannedCollective("all_gather", size, kept)] * (passes if kept > 1 else 0)
        yield from [PlannedCollective("all_gather", size, inner)] * passes


def _model_axis_sums(here: _RankPlacements) -> Iterator[PlannedCollective]:
    """Yield the gradient sums over tp, cp and pp besides those over data axes, once a step."""
    tensors: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    parts = [(here.rows[b.names[0]], here.own_elements(b)) for b in here.buckets]
    parts = [(row, size) for row, size in parts if row.data != "rows"]
    rows = [row for row in here.rows.values() if row.data == "rows" and row.trains]
    for row, elements in [*parts, *((row, here.unpadded_elements(row)) for row in rows)]:
        for axis in (axis for axis in row.sum_over if axis in ("tp", "cp", "pp")):
            key = (axis, row.stages if axis == "pp" else (), row.dtype)
            if elements:
                tensors.setdefault(key, []).append(elements * row.element_bytes)
    for (axis, stages, _), sizes in tensors.items():
        degree = len(stages) if axis == "pp" else getattr(here.plan.layout, axis)
        for message_bytes in _message_bytes(sizes):
            yield PlannedCollective("all_reduce", message_bytes, degree)


def _message_bytes(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the bytes of each message: tensors share a message up to a bucket's bytes."""
    held = 0
    for size in sizes:
        if held and held + size > BUCKET_BYTES:
            yield held
            held = 0
        held += size
    yield held


def _sent_bytes(plan: Plan, dtype: str) -> int:
    """Return the bytes of a gradient element in sums over data axes."""
    return {"fp32": 4, "bf16": 2}.get(plan.sums) or dtype_bytes(dtype)


def _gathered_bytes(unit: str, rows: Sequence[Placement]) -> int:
    """Return the bytes of an element in zero 3's gathers: narrow if compute reads it narrow."""
    formats = {row.compute for row in rows if len(row.shape) >= 2}
    narrow = next(iter(formats)) if unit and len(formats) == 1 else ""
    return dtype_bytes(narrow or rows[0].dtype)


def stepped_bytes(plan: Plan, rank: int) -> list[int]:
    """Return bytes of each tensor that a rank's optimizer steps, in the order of the module.

    Args:
        plan: with its placements.

    >>> from shoal.base.layouts.layout import Layout
    >>> rows = [Placement(name, (6,), "float32", True, data="states") for name in "ab"]
    >>> plan = Plan(Layout(dp_shard=2, zero=1), 4, 2, 1, placements=tuple(rows))
    >>> [stepped_bytes(plan, rank) for rank in (0, 1)]  # the bucket: 6 of b, 6 of a
    [[24], [24]]
    """
    here = _RankPlacements(plan, rank)
    found = {name: here.unpadded_elements(row) for name, row in here.rows.items() if row.trains}
    for bucket in here.buckets:
        begin, end = here.own_range(bucket)
        at = 0
        for name in bucket.names:
            row = here.rows[name]
            size = math.prod(row.local_shape(here.at))
            if row.data != "rows":
                found[name] = max(0, min(end, at + size) - max(begin, at))
            at += size
    return [size * here.rows[name].element_bytes for name, size in found.items() if size]


class _RankPlacements:
    """Placements and buckets, with their cuts, of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.layout, self.at = plan, plan.layout, plan.layout.at(rank)
        self.rows = {row.name: row for row in plan.placements if self.at["pp"] in row.stages}
        buckets = plan_buckets(plan.placements, self.layout, rank)
        if [b.names for b in buckets] == [b.names for b in plan.buckets]:
            self.buckets = plan.buckets  # with the cuts that suit the optimizer
        elif self.layout.zero in (1, 2):
            self.buckets = cut_buckets(buckets, plan.placements, self.layout, rank)
        else:
            self.buckets = buckets

    def own_elements(self, bucket: Bucket) -> int:
        """Return the elements of a bucket that this rank steps."""
        begin, end = self.own_range(bucket)
        return end - begin

    def own_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the start and stop of this rank's elements in the bucket."""
        if not bucket.cuts:
            return 0, bucket.elements
        outer, inner = self.rows[bucket.names[0]].data_axes
        row = self.rows[bucket.names[0]]
        owner = self.at[outer] * row.degree(inner, self.layout) + self.at[inner]
        return bucket.cuts[owner], bucket.cuts[owner + 1]

    def row_elements(self, row: Placement) -> int:
        """Return a parameter's elements per rank under ZeRO-3: ceil(rows / ranks) rows of it."""
        shape = row.local_shape(self.at)
        return -(-shape[0] // row.degree(row.data_axes[1], self.layout)) * math.prod(shape[1:])

    def row_bytes(self, row: Placement) -> int:
        """Return the bytes allocated on every rank under zero 3."""
        return self.row_elements(row) * row.element_bytes

    def unpadded_elements(self, row: Placement) -> int:
        """Return the allocated elements that hold rows, without padding."""
        return row.stored_shard(self.at, self.layout).elements

    def units(self) -> dict[str, list[Placement]]:
        """Return placements by the unit that gathers them; "" for those of no whole unit here."""
        every = [row for row in self.plan.placements if row.data == "rows"]
        elsewhere = {row.unit for row in every if self.at["pp"] not in row.stages}
        found: dict[str, list[Placement]] = {}
        for row in every:
            if row.name in self.rows:
                found.setdefault("" if row.unit in elsewhere else row.unit, []).append(row)
        return found
