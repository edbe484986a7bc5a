"""Units of a model that one pipeline rank holds, and its micro-batches in flight.

    Shoal    equal-cost runs of blocks: the largest stage cost is as small as possible. The first
             stage also has the units before the blocks, the last one those after them.
             cost of a unit = its share of the forward FLOP + its share of the parameters; a tied
             table counts at its second use, the loss does not count
    others   runs of equal length; the remainder goes to the middle, since the first rank has the
             embedding and the last one the head

zbv folds the pipeline (embedding and head on rank 0). interleaved gives several stages to a rank.
dualpipe keeps two model copies, fed from both ends: rank i has the runs i and p − 1 − i, so that
embedding and head are both on the first and on the last rank.

In flight on rank i of p, of m micro-batches (v chunks per rank):
    gpipe m · 1f1b min(m, p − i) · zero-bubble, zbv min(m, p) · dualpipe min(m, p + 1)
    interleaved min(m, (2(p − i − 1) + (v − 1)p + 1)/v)
With a split backward, saved activations stay until its second half. So do the gradients of the
products' outputs, of as many micro-batches as are between the two halves at the same time.

Source: Narayanan et al. 2021 (2104.04473) §2.2; Qi et al. 2023; DeepSeek-V3 report, table 2. The
rule is that of `parallel.pipeline.deal`, which cuts the real module. tests/worlds compare the two;
tests/planning compare the formulas to the schedules of shoal.planning.pipeline_schedules.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.layouts.schedule_names import (
    SPLIT_BACKWARD,
    canonical_schedule,
    check_stages,
    model_copies,
    stages_of,
    stages_per_rank,
)
from shoal.planning.chain_partition import partition
from shoal.planning.pipeline_schedules import make_schedule

BARE_OPERATIONS = 3
"""Least number of operations of a block; a smaller unit is one layer and its activation."""


class StageUnits(NamedTuple):
    """Units of the model that one pipeline rank holds.

    Attributes:
        units: (unit, count), embedding and head included.
        blocks: `units` without embedding and head.
        head: the unit that computes the loss, if this rank holds it.
        tied: elements of a tied table of which this rank holds a copy.
        copies: model copies in the pipeline: a micro-batch passes this share of the blocks.
    """

    rank: int
    units: list[tuple[UnitFacts, float]]
    blocks: list[tuple[UnitFacts, float]]
    head: UnitFacts | None
    tied: float = 0.0
    copies: int = 1


def deferred_weight_gradients(schedule: str, ranks: int, micro_batches: int, rank: int) -> float:
    """Return the most micro-batches of a rank that wait between I and W, in shares of the rank.

    I and W are the two halves of a split backward. Those of the first stage count as none: its
    inputs have no gradient, so that W is all of its backward. Counted from the lists, whose pattern
    repeats.

    >>> (
    ...     [deferred_weight_gradients("zero-bubble", 4, 8, rank) for rank in range(4)],
    ...     deferred_weight_gradients("1f1b", 4, 8, 2),
    ... )
    ([0.0, 2.0, 3.0, 4.0], 0.0)
    >>> deferred_weight_gradients("zbv", 2, 4, 0)
    0.5
    """
    name = canonical_schedule(schedule)
    if name not in SPLIT_BACKWARD or ranks == 1:
        return 0.0
    return _deferred_by_rank(name, ranks, min(micro_batches, 2 * ranks))[rank]


@lru_cache(maxsize=64)
def _deferred_by_rank(name: str, ranks: int, micro_batches: int) -> tuple[float, ...]:
    try:
        schedule = make_schedule(name, ranks, micro_batches)
    except PlanError:  # too few micro-batches for this schedule: its least number is an upper bound
        schedule = make_schedule(name, ranks, 2 * ranks)
    found = []
    for acts in schedule.ranks:
        alive = waiting = 0
        fullest = (0.0, 0)
        for act in acts:
            halved = act.stage % schedule.stages_per_copy > 0
            alive += act.kind == "F"
            waiting += act.kind == "I" and halved
            fullest = max(fullest, (alive + waiting / 3, waiting))  # W needs a third of it
            alive -= act.kind in "BW"
            waiting -= act.kind == "W" and halved
        found.append(fullest[1] * ranks / schedule.stages_per_copy)
    return tuple(found)


def is_block(unit: UnitFacts) -> bool:
    """Return whether a unit is a block, which pipelines distribute and recompute treats as one."""
    return not unit.loss_bytes and unit.name not in ("embedding", "head")


def is_layer_unit(unit: UnitFacts) -> bool:
    """Return whether a unit is a single layer, so that it has one matrix."""
    return 0 < unit.operations <= BARE_OPERATIONS


def root_share(unit: UnitFacts) -> float:
    """Return the share of a unit's elements that fsdp gathers with the root, outside all blocks.

    >>> root_share(UnitFacts("embedding", parameters=8)), root_share(UnitFacts("block"))
    (1.0, 0.0)
    >>> root_share(UnitFacts("block0", parameters=6, frozen_parameters=2, rooted_parameters=8))
    1.0
    """
    if not is_block(unit):
        return 1.0
    return unit.rooted_parameters / max(1, unit.parameters + unit.frozen_parameters)


def block_count(model: ModelFacts) -> int:
    """Return the number of blocks that a pipeline can distribute."""
    return sum(unit.count for unit in repeated_units(model))


def repeated_units(model: ModelFacts) -> tuple[UnitFacts, ...]:
    """Return the units that a pipeline distributes, in order."""
    first, stop = _repeated_range(model)
    return model.units[first:stop]


def _repeated_range(model: ModelFacts) -> tuple[int, int]:
    """Return start and stop of the repeated units; without repetition, of all but both ends."""
    units = model.units
    found = [n for n, u in enumerate(units) if u.count > 1 or u.name.endswith("block")]
    found = found or [n for n, unit in enumerate(units) if is_block(unit)]
    return (found[0], found[-1] + 1) if found else (0, 0)


def stage_units(case: PlanningCase, index: int) -> StageUnits:
    """Return the units of pipeline rank `index`.

    Raises:
        PlanError: more stages than blocks.
    """
    units, ranks = case.model.units, case.layout.pp
    if ranks == 1:
        every = [(unit, float(unit.count)) for unit in units]
        head = next((unit for unit in reversed(units) if unit.loss_bytes), None)
        return StageUnits(0, every, [pair for pair in every if is_block(pair[0])], head)
    first, stop = _repeated_range(case.model)
    total = block_count(case.model)
    check_stages(case.layout.schedule, ranks, case.layout.chunks, total, case.model.name)
    runs = _block_runs(case, index, total)
    held = [
        pair for start, end in runs for pair in _units_between(list(units[first:stop]), start, end)
    ]
    every = list(held)
    starts, ends = any(start == 0 for start, _ in runs), any(end == total for _, end in runs)
    tied = 0.0
    if starts:
        every = [(unit, float(unit.count)) for unit in units[:first]] + every
    if ends:
        every += [(unit, float(unit.count)) for unit in units[stop:]]
        tied = 0.0 if starts else sum(_tied_elements(case.model, u) for u in units[stop:])
    head = next((unit for unit, _ in reversed(every) if unit.loss_bytes), None)
    return StageUnits(
        index, every, held, head, tied, model_copies(canonical_schedule(case.schedule))
    )


def _block_runs(case: PlanningCase, index: int, total: int) -> list[tuple[int, int]]:
    """Return the (start, stop) runs of blocks that pipeline rank `index` holds."""
    ranks, schedule = case.layout.pp, canonical_schedule(case.schedule)
    if case.framework != "shoal":
        both = [index, ranks - 1 - index][: model_copies(schedule)]
        return [_even(total, ranks, piece) for piece in both]
    pieces = min(total, ranks * stages_per_rank(schedule, case.chunks) // model_copies(schedule))
    own = stages_of(schedule, ranks, index, pieces)
    starts = [*_stage_starts(case.model, pieces), total]
    return [(starts[piece], starts[piece + 1]) for piece in own if piece < pieces]


def _tied_elements(model: ModelFacts, unit: UnitFacts) -> float:
    """Return the elements of the table that a unit shares with another unit."""
    table = next((other for other in model.units if unit.tied_to == other.name), None)
    return float(table.parameters - table.plain_parameters) if table else 0.0


@lru_cache(maxsize=256)
def _stage_starts(model: ModelFacts, stages: int) -> tuple[int, ...]:
    """Return the index of the first block of each stage."""
    first, stop = _repeated_range(model)
    flops = max(1.0, sum(u.count * u.forward_flops for u in model.units if not u.loss_bytes))
    elements = max(1, sum(u.count * (u.parameters + u.frozen_parameters) for u in model.units))

    def cost(unit: UnitFacts) -> float:
        held = unit.parameters + unit.frozen_parameters + _tied_elements(model, unit)
        return held / elements + (0.0 if unit.loss_bytes else unit.forward_flops / flops)

    chain = [cost(unit) for unit in model.units[first:stop] for _ in range(unit.count)]
    chain[0] += sum(unit.count * cost(unit) for unit in model.units[:first])
    chain[-1] += sum(unit.count * cost(unit) for unit in model.units[stop:])
    return tuple(partition(chain, stages))


def _units_between(blocks: list[UnitFacts], start: int, stop: int) -> list[tuple[UnitFacts, float]]:
    held = []
    at = 0
    for unit in blocks:
        count = min(stop, at + unit.count) - max(start, at)
        if count > 0:
            held.append((unit, float(count)))
        at += unit.count
    return held


def _even(blocks: int, ranks: int, index: int) -> tuple[int, int]:
    """Return the first and one past the last block of a rank, in equal runs."""
    base, extra = divmod(blocks, ranks)
    shift = 1 if extra <= ranks - 2 else 0
    before = min(max(0, index - shift), extra)
    after = min(max(0, index + 1 - shift), extra)
    return base * index + before, base * (index + 1) + after
