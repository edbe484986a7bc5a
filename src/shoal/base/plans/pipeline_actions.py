"""Pipeline actions: the ordered work of each rank of a pipeline in one step, as data.

The planner generates and checks one list of actions, the simulator times it, the trainer executes
it, the report draws it. Messages are not actions: a stage's forward needs the previous stage's
output and its backward the next stage's gradient, which determines all messages.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "F": "forward",
    "B": "whole backward",
    "I": "backward for the input's gradient only",
    "W": "backward for the weights' gradients only",
}


@dataclass(frozen=True)
class Action:
    """One pass in a pipeline: a forward or backward of one micro-batch on one stage of the model.

    Attributes:
        kind: F forward, B whole backward; its two halves: I gradient of the stage's input, W of its
            weights.
        stage, micro_batch: numbers from 0, of all copies of the model and of the whole step.

    `text()` returns kind, micro-batch @ stage.

    >>> Action("F", 0, 3).text()
    'F3@0'
    """

    kind: str
    stage: int
    micro_batch: int

    def text(self) -> str:
        """Return kind, micro-batch and stage, as drawings show them."""
        return f"{self.kind}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """Actions of every rank in a pipeline's whole step, and the rank of each stage.

    Attributes:
        ranks: actions of rank 0, 1, …, in execution order.
        stage_rank: rank that holds stage 0, 1, …; a rank may hold several (virtual stages, chunks).
        micro_batches: micro-batches per step, over all copies.
        copies: copies of the model on the ranks: with two (dualpipe) the first half of the stages
            is one copy, which runs the first half of the micro-batches (`runs`).
        pairs: per rank: indices in its actions of a forward that may run as one block with the next
            backward, so that messages of one overlap with the work of the other.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    micro_batches: int
    copies: int = 1
    pairs: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages, all copies together."""
        return len(self.stage_rank)

    @property
    def stages_per_copy(self) -> int:
        """Number of stages of one copy: a chain from stage k·pieces to (k + 1)·pieces − 1."""
        return len(self.stage_rank) // self.copies

    def runs(self, stage: int) -> range:
        """Return the micro-batches of a stage: all, or its copy's part of them.

        >>> odd = PipelineSchedule("two copies", ((), ()), (0, 1, 1, 0), 5, copies=2)
        >>> odd.runs(0), odd.runs(3)
        (range(0, 3), range(3, 5))
        """
        copy = stage // self.stages_per_copy
        first, stop = (-(-self.micro_batches * c // self.copies) for c in (copy, copy + 1))
        return range(first, stop)
