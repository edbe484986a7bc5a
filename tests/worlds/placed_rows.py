"""Recomputes from a plan's rows alone what one of its ranks holds, saves and sends.

It imports shoal.base only: nothing of the code that made the rows, or that a run reads them with.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Plan

BUCKET_BYTES = 25 * 2**20
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8}
MODEL_AXES = ("tp", "cp", "pp")


@dataclass
class Told:
    """What the rows say of a rank; moments: bytes of state per byte that is stepped."""

    weights: int = 0
    gradients: int = 0
    stepped: int = 0
    masters: int = 0
    buckets: list[tuple[str, ...]] = field(default_factory=list)
    sums: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    slices: dict[str, set[int]] = field(default_factory=dict)


def told_of(plan: Plan, rank: int) -> Told:
    """Everything that the rows say of one rank."""
    at, told = plan.layout.at(rank), Told()
    mine = [row for row in plan.placements if at["pp"] in row.stages]
    shared: dict[tuple[str, tuple[int, ...]], int] = {}
    for row in mine:
        part = local(row, at)
        told.slices[row.name] = set(part)
        if row.data == "rows":
            _rows_of_zero3(plan, row, at, part, told, shared)
        elif not row.trains:
            told.weights += len(part) * BYTES[row.dtype]
    for names in buckets(mine, plan, at):
        _bucket(plan, [row for row in mine if row.name in names], names, at, told, shared)
    _units(plan, mine, at, told)
    for (axis, stages), size in shared.items():
        told.sums["all_reduce", size, len(stages) or getattr(plan.layout, axis)] += 1
    return told


def local(row: Placement, at: dict[str, int]) -> list[int]:
    """Places, in the flat whole tensor, of what a rank computes with, in stored order."""
    if row.cut is None:
        return list(range(math.prod(row.shape)))
    dim, number = row.cut.dim, row.cut.part[at[row.cut.axis]]
    kept = [k for e in row.cut.segments for k in range(e[number], e[number + 1])]
    after = math.prod(row.shape[dim + 1 :])
    return [
        (before * row.shape[dim] + k) * after + last
        for before in range(math.prod(row.shape[:dim]))
        for k in kept
        for last in range(after)
    ]


def buckets(rows: list[Placement], plan: Plan, at: dict[str, int]) -> list[tuple[str, ...]]:
    """Names that travel together, filled from the last parameter on."""
    found: list[tuple[str, ...]] = []
    filling: dict[object, list[tuple[str, int]]] = {}
    for row in reversed([row for row in rows if row.trains]):
        tp = len(row.cut.part) // (len(row.cut.segments[0]) - 1) if row.cut else plan.layout.tp
        tp = plan.layout.tp if row.is_expert else tp
        kind = (row.dtype, row.compute, row.is_expert, row.data, tp, row.stages, row.sum_over)
        size = len(local(row, at)) * BYTES[row.dtype]
        if sum(s for _, s in filling.get(kind, [])) + size > BUCKET_BYTES and filling.get(kind):
            found.append(tuple(name for name, _ in filling.pop(kind)))
        filling.setdefault(kind, []).append((row.name, size))
    return found + [tuple(name for name, _ in held) for held in filling.values()]


def _bucket(plan, rows, names, at, told, shared) -> None:  # type: ignore[no-untyped-def]
    """One gradient buffer: what it keeps, who sums it, and whose share of it is whose."""
    first = {row.name: row for row in rows}[names[0]]
    told.buckets.append(names)
    if first.data == "rows":
        return
    degrees = [first.degree(axis, plan.layout) for axis in first.data_axes]
    ranks, place = math.prod(degrees), at[first.data_axes[0]] * degrees[1] + at[first.data_axes[1]]
    elements = sum(len(local(row, at)) for row in rows)
    wide, read = BYTES[first.dtype], BYTES[first.compute or first.dtype]
    own, start, stop = elements, 0, elements
    if first.data == "states":
        own = -(-elements // ranks)
        start, stop, elements = own * place, own * (place + 1), own * ranks
        once = plan.layout.zero == 1 or plan.defer_sync
        told.sums["reduce_scatter", elements * wide, ranks] += 1 if once else plan.accumulate
    elif ranks > 1:
        told.sums["all_reduce", elements * wide, ranks] += 1
    told.weights += elements * read
    told.gradients += (own if plan.layout.zero == 2 and not plan.defer_sync else elements) * wide
    told.stepped += own * wide
    told.masters += own * wide if first.compute else 0
    before = 0
    for name in names if first.data == "states" and first.compute else ():
        part = local({row.name: row for row in rows}[name], at)
        told.slices[name] = set(part[max(0, start - before) : max(0, stop - before)])
        before += len(part)
    _also_over(first, own * wide, shared)


def _rows_of_zero3(plan, row, at, part, told, shared) -> None:  # type: ignore[no-untyped-def]
    """What a rank keeps of a tensor of which every rank has ceil(rows / ranks) rows."""
    axis = row.data_axes[1]
    cut = row.cut
    rows = sum(e[1] - e[0] for e in cut.segments) if cut and cut.dim == 0 else row.shape[0]
    each = -(-rows // row.degree(axis, plan.layout)) * (len(part) // rows)
    told.slices[row.name] = set(part[at[axis] * each : (at[axis] + 1) * each])
    told.weights += each * BYTES[row.dtype]
    if row.trains:
        told.gradients += each * BYTES[row.dtype]
        told.stepped += len(told.slices[row.name]) * BYTES[row.dtype]
        _also_over(row, len(told.slices[row.name]) * BYTES[row.dtype], shared)


def _units(plan, mine, at, told) -> None:  # type: ignore[no-untyped-def]
    """Sums of zero 3: one reduce-scatter per unit and micro-batch, then over whole copies."""
    elsewhere = {r.unit for r in plan.placements if at["pp"] not in r.stages}
    units: dict[str, list[Placement]] = {}
    for row in (row for row in mine if row.data == "rows" and row.trains):
        units.setdefault(row.unit if row.unit not in elsewhere else "", []).append(row)
    for unit, rows in units.items():
        calls = rows[0].calls if unit else 1
        outer, inner = (rows[0].degree(axis, plan.layout) for axis in rows[0].data_axes)
        size = 0
        for row in rows:
            ends = row.cut.segments if row.cut and row.cut.dim == 0 else ((0, row.shape[0]),)
            long = sum(e[1] - e[0] for e in ends)
            size += -(-long // inner) * (len(local(row, at)) // long) * BYTES[row.dtype]
        told.sums["reduce_scatter", size * inner, inner] += plan.accumulate * calls
        if outer > 1:
            told.sums["all_reduce", size, outer] += plan.accumulate * calls


def _also_over(row, size, shared) -> None:  # type: ignore[no-untyped-def]
    for axis in (axis for axis in row.sum_over if axis in MODEL_AXES):
        key = (axis, row.stages if axis == "pp" else ())
        shared[key] = shared.get(key, 0) + size
