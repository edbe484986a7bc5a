"""The eight LLM-Training-Puzzles: set-ups, the author's scores, solving programs, their scores.

    score = (start of the last event, most memory held where an event starts), over all ranks

The author's notebook prints them so: the last update's own 0.5 and the outputs of the running event
are not counted (`score(…, sample="all")` counts the outputs).
Source: github.com/srush/LLM-Training-Puzzles (MIT), by Sasha Rush; planning reference, section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError, check_choice
from shoal.base.plans.timeline import Timeline
from shoal.teach.costs import PuzzleCosts
from shoal.teach.engine import Costs, run_ops
from shoal.teach.puzzles import ours as puzzles_ours
from shoal.teach.puzzles import reference as puzzles_reference
from shoal.teach.puzzles.model import Program, PuzzleRank
from shoal.teach.puzzles.puzzle_world import run_puzzle


@dataclass(frozen=True)
class Puzzle:
    """One set-up; target is the notebook's goal, author the score of its own program.

    Attributes:
        program, better: the author's program and Shoal's.
    """

    number: int
    title: str
    layers: int
    batches: int
    ranks: int
    target: tuple[float, float]
    author: tuple[float, float]
    program: Program
    better: Program

    def run_program(self, program: Program, mailbox: str = "one") -> list[PuzzleRank]:
        """Run a program under the rules.

        Raises:
            PlanError: the program breaks a rule.
        """
        return run_puzzle(program, self.ranks, self.layers, self.batches, mailbox)

    def reference(self) -> list[PuzzleRank]:
        """Run the author's program."""
        return self.run_program(self.program)

    def run_ours(self) -> list[PuzzleRank]:
        """Run Shoal's program."""
        return self.run_program(self.better)


REFERENCE, OURS = puzzles_reference, puzzles_ours
PUZZLES = (
    Puzzle(0, "standard training", 2, 4, 1, (17, 2.6e6), (16.5, 2_621_440),
           REFERENCE.standard, OURS.standard),
    Puzzle(1, "gradient accumulation", 2, 4, 1, (17, 2.0e6), (16.5, 1_966_080),
           REFERENCE.accumulate, OURS.accumulate),
    Puzzle(2, "distributed data parallel", 2, 4, 4, (5, 1.8e6), (5.1, 1_835_008),
           REFERENCE.ddp, OURS.ddp),
    Puzzle(3, "weight-sharded data parallel", 6, 4, 4, (20, 2.8e6), (19.9, 2_752_512),
           REFERENCE.weight_sharded, OURS.weight_sharded),
    Puzzle(4, "fully sharded data parallel", 6, 4, 4, (20, 2.3e6), (19.9, 2_359_296),
           REFERENCE.fsdp, OURS.fsdp),
    Puzzle(5, "pipeline", 8, 4, 4, (66, 3.3e6), (66.9, 3_145_728),
           REFERENCE.pipeline, OURS.pipeline),
    Puzzle(6, "GPipe", 8, 4, 4, (33, 4.1e6), (33.3, 4_194_304),
           REFERENCE.gpipe, OURS.one_f_one_b),
    Puzzle(7, "pipeline + FSDP", 4, 4, 16, (15, 1.0e6), (15.5, 966_656),
           REFERENCE.pipeline_fsdp, OURS.pipeline_fsdp),
)  # fmt: skip


def get_puzzle(number: int) -> Puzzle:
    """Return the puzzle of a number.

    Raises:
        PlanError: there is none.
    """
    if not 0 <= number < len(PUZZLES):
        last = len(PUZZLES) - 1
        raise PlanError(
            f"puzzle = {number}: puzzles are 0 to {last}; try: {min(max(number, 0), last)}"
        )
    return PUZZLES[number]


PUZZLE_COSTS = PuzzleCosts()


def puzzle_run_timeline(
    models: Sequence[PuzzleRank],
    title: str = "",
    sample: str = "start",
    costs: Costs = PUZZLE_COSTS,
) -> Timeline:
    """Return a played puzzle as a timeline, in steps, or in the unit of another cost table."""
    line = run_ops([model.ops for model in models], costs, title, "steps", sample)
    line = replace(line, held_unit="numbers")
    steps, memory = _score(line)
    line.facts["score"] = f"{steps:g} steps, memory {memory:,.0f}"
    return line


def score(models: Sequence[PuzzleRank], sample: str = "start") -> tuple[float, float]:
    """Return (time, memory) as the notebook counts them; sample "all" adds outputs to the memory.

    >>> score(PUZZLES[0].reference())
    (16.5, 2621440.0)
    """
    return _score(puzzle_run_timeline(models, sample=sample))


def _score(line: Timeline) -> tuple[float, float]:
    """Round a score to a thousandth of a step: sums of 0.1 and 0.2 are not exact."""
    steps = max(span.start_s for span in line.spans)
    return round(steps, 3), max(held.held_bytes for held in line.memory)


def puzzle_timeline(number: int, which: str = "ours", sample: str = "start") -> Timeline:
    """Return the timeline of one puzzle.

    Args:
        which: reference (the author's program) or ours (Shoal's).

    Raises:
        PlanError: the puzzle or the program does not exist.

    >>> puzzle_timeline(2, "reference").facts["score"]
    '5.1 steps, memory 1,835,008'
    """
    check_choice("puzzle's program", which, ("reference", "ours"), kind=PlanError)
    puzzle = get_puzzle(number)
    models = puzzle.reference() if which == "reference" else puzzle.run_ours()
    return puzzle_run_timeline(models, f"puzzle {number}, {puzzle.title}: {which}", sample)
