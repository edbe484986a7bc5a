"""Looks for better solutions of the puzzles by trying every setting of our programs' switches.

Tried: when things are forgotten, when layers are updated, how many layers stay gathered, how a
batch is cut, how far each rank of a pipeline runs ahead, one mailbox per rank or one per sender.
Kept: the programs that no other beats in time and memory at once and that are no worse than the
author's in either. Exhaustive within these families, so what it finds is their best, not the
puzzle's: other programs may be better still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shoal.base.errors import PlanError
from shoal.base.plans.timeline import Timeline
from shoal.teach.puzzles import Puzzle, get_puzzle, puzzle_run_timeline, score
from shoal.teach.puzzles.model import Program
from shoal.teach.puzzles.ours import DataParallelProgram, PipelineProgram, ShardedPipelineProgram

SHARDED = {3: "weights", 4: "all"}


@dataclass(frozen=True)
class Found:
    """One solution: its switches, start of its last event, its memory, the mailbox it needs."""

    program: Program
    steps: float
    memory: float
    mailbox: str

    def text(self) -> str:
        """Score and switches on one line."""
        return f"{self.steps:g} steps, {self.memory:,.0f}, mailbox {self.mailbox}: {self.program}"


def search(number: int) -> list[Found]:
    """Best solutions of one puzzle, fastest first.

    >>> [(found.steps, found.memory) for found in search(2)]
    [(5.1, 1572864.0)]
    """
    puzzle = get_puzzle(number)
    found = []
    for program, mailbox in _settings(puzzle):
        try:
            steps, memory = score(puzzle.run_program(program, mailbox))
        except PlanError:
            continue  # a setting under which ranks wait for each other is no solution
        if steps <= puzzle.author[0] and memory <= puzzle.author[1]:
            found.append(Found(program, steps, memory, mailbox))
    return _front(found)


def _settings(puzzle: Puzzle) -> Iterator[tuple[Program, str]]:
    """Every setting of the family to which the puzzle belongs."""
    flags = (True, False)
    if puzzle.number in (0, 1):
        for parts, soon, early in product(_cuts(puzzle.batches), flags, flags):
            yield DataParallelProgram(parts, "", soon, early), "one"
    elif puzzle.number in (2, 3, 4):
        sharded = SHARDED.get(puzzle.number, "")
        keeps = range(puzzle.layers + 1) if sharded else range(1)
        for soon, early, keep in product(flags, flags, keeps):
            yield DataParallelProgram((1,), sharded, soon, early, keep), "one"
    elif puzzle.number in (5, 6):
        cuts = _cuts(puzzle.batches) if puzzle.number == 6 else [(puzzle.batches,)]
        for parts, mailbox, at_once in product(cuts, ("one", "each"), flags):
            for ahead in product(*_leads(puzzle.ranks, len(parts))):
                yield PipelineProgram(parts, at_once, True, ahead), mailbox
    else:
        for waits, early, keep in product(flags, flags, range(puzzle.layers + 1)):
            yield ShardedPipelineProgram(4, waits, early, keep), "one"


def _cuts(total: int) -> list[tuple[int, ...]]:
    """Ways to cut a batch into parts, in order.

    >>> _cuts(3)
    [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    ways: list[tuple[int, ...]] = [(total,)]
    for first in range(1, total):
        ways += [(first, *rest) for rest in _cuts(total - first)]
    return sorted(ways, key=len)


def _leads(ranks: int, parts: int) -> list[range]:
    """By rank: how many forwards more than in 1f1b can be run ahead.

    >>> _leads(2, 3)
    [range(0, 2), range(0, 3)]
    """
    return [range(max(1, parts - min(parts, ranks - 1 - rank))) for rank in range(ranks)]


def _front(found: list[Found]) -> list[Found]:
    """Those that no other beats; a mailbox per sender counts only where it beats a single one."""
    best: list[Found] = []
    for mailbox in ("one", "each"):
        kept = list(best)
        for new in sorted(found, key=lambda f: (f.steps, f.memory)):
            beaten = any(b.steps <= new.steps and b.memory <= new.memory for b in [*best, *kept])
            if new.mailbox == mailbox and not beaten:
                kept.append(new)
        best = kept
    return sorted(best, key=lambda f: (f.steps, f.memory))


def found_timeline(number: int, place: int = 0, sample: str = "start") -> Timeline:
    """The drawing of a solution that the search found: place 0 is the fastest.

    Errors  PlanError for a puzzle or a place that does not exist
    """
    puzzle, solutions = get_puzzle(number), search(number)
    if not 0 <= place < len(solutions):
        raise PlanError(
            f"puzzle {number}: solution {place} does not exist, the search found "
            f"{len(solutions)}; try: {min(max(place, 0), len(solutions) - 1)}"
        )
    found = solutions[place]
    models = puzzle.run_program(found.program, found.mailbox)
    return puzzle_run_timeline(
        models, f"puzzle {number}, {puzzle.title}: found by the search", sample
    )
