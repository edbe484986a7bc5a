"""Which units of a model one pipeline rank holds, and how many micro-batches it keeps.

Blocks are dealt in equal runs; what is left over goes to the middle, since the first rank has the
embedding and the last one the head. zbv folds the pipeline (embedding and head on rank 0), dualpipe
keeps two copies fed from both ends (both on the first and on the last rank).

In flight on rank i of p, of m micro-batches (v chunks per rank):
    gpipe m · 1f1b min(m, p − i) · zero-bubble, zbv min(m, p) · dualpipe min(m, p + 1)
    interleaved min(m, (2(p − i − 1) + (v − 1)p + 1)/v)

Source: Narayanan et al. 2021 (2104.04473) §2.2; Qi et al. 2023; DeepSeek-V3 report, table 2.
tests/planner holds the formulas to the schedules that shoal.planner.schedules makes.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.errors import PlanError
from shoal.base.estimate import Case, ModelFacts, UnitFacts
from shoal.planner.bubble import canonical


class Stage(NamedTuple):
    """What one pipeline rank holds.

    units    (unit, how many), embedding and head included · blocks  those without the two
    head     the unit that makes the loss, if it is here
    tied     elements of a tied table that this rank holds a copy of
    copies   of each block (2 for dualpipe)
    """

    rank: int
    units: list[tuple[UnitFacts, float]]
    blocks: list[tuple[UnitFacts, float]]
    head: UnitFacts | None
    tied: float = 0.0
    copies: int = 1


def in_flight(schedule: str, ranks: int, micro_batches: int, rank: int, chunks: int = 1) -> float:
    """Most micro-batches whose activations pipeline rank `rank` keeps, in shares of the rank.

    Errors  PlanError for a schedule that is not known

    >>> [in_flight("1f1b", 4, 8, rank) for rank in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    >>> in_flight("interleaved", 4, 8, 0, chunks=2), in_flight("gpipe", 4, 8, 3)
    (5.5, 8.0)
    """
    name = canonical(schedule)
    if ranks == 1:
        return 1.0
    if name == "gpipe":
        kept = float(micro_batches)
    elif name == "1f1b":
        kept = ranks - rank
    elif name == "interleaved":
        kept = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks
    else:
        kept = ranks + (name == "dualpipe")
    return float(min(micro_batches, kept))


def is_block(unit: UnitFacts) -> bool:
    """A unit that a pipeline deals out and recompute treats as one."""
    return not unit.loss_bytes and unit.name not in ("embedding", "head")


def block_count(model: ModelFacts) -> int:
    """How many blocks a pipeline can deal out."""
    return sum(unit.count for unit in model.units if is_block(unit))


def cut(case: Case, index: int) -> Stage:
    """The units of pipeline rank `index`.

    Errors  PlanError for more ranks than blocks
    """
    units, ranks = case.model.units, case.layout.pp
    if ranks == 1:
        every = [(unit, float(unit.count)) for unit in units]
        head = next((unit for unit in reversed(units) if unit.loss_bytes), None)
        return Stage(0, every, [pair for pair in every if is_block(pair[0])], head)
    blocks = [unit for unit in units if is_block(unit)]
    total = block_count(case.model)
    if ranks > total:
        raise PlanError(
            f"layout.pp = {ranks}: more stages than the {total} blocks of {case.model.name}; "
            f"nearest legal: layout.pp={max(1, total)}"
        )
    first, last, copies = _ends(canonical(case.schedule), index, ranks)
    held = _held(blocks, *_range(total, ranks, index))
    every = [(unit, count * copies) for unit, count in held]
    tied = 0.0
    if first and not is_block(units[0]):
        every.insert(0, (units[0], 1.0))
    if last and not is_block(units[-1]):
        every.append((units[-1], 1.0))
        if units[-1].tied_to and not first:
            table = next(unit for unit in units if unit.name == units[-1].tied_to)
            tied = float(table.parameters - table.plain_parameters)
    head = next((unit for unit, _ in reversed(every) if unit.loss_bytes), None)
    return Stage(index, every, held, head, tied, copies)


def _ends(schedule: str, index: int, ranks: int) -> tuple[bool, bool, int]:
    """Whether embedding and head are on this rank, and copies of its blocks."""
    if schedule == "zbv":
        return index == 0, index == 0, 1
    if schedule == "dualpipe":
        outer = index in (0, ranks - 1)
        return outer, outer, 2
    return index == 0, index == ranks - 1, 1


def _held(blocks: list[UnitFacts], start: int, stop: int) -> list[tuple[UnitFacts, float]]:
    held = []
    at = 0
    for unit in blocks:
        count = min(stop, at + unit.count) - max(start, at)
        if count > 0:
            held.append((unit, float(count)))
        at += unit.count
    return held


def _range(blocks: int, ranks: int, index: int) -> tuple[int, int]:
    """First and one past the last block of a rank."""
    base, extra = divmod(blocks, ranks)
    shift = 1 if extra <= ranks - 2 else 0
    before = min(max(0, index - shift), extra)
    after = min(max(0, index + 1 - shift), extra)
    return base * index + before, base * (index + 1) + after
