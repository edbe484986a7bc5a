"""Runs the forward passes of one wrong step again, in one process, with a mistake made on purpose.

A wrong loss is no sum of right ones, so nothing can be solved for. But the one process can take the
layout's first wrong step once more while a suspected mistake is made in its module: the mistake that
gives the layout's very loss is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from shoal.parallel.program import Pass, Program, Reducer
from shoal.proof.diagnosis.evidence import Evidence
from shoal.trainer._torch import pytree
from shoal.trainer.run import Run
from shoal.trainer.step.micro_batch import MicroBatch


class StepAgain:
    """The forward passes of one step of one process, to be run again with a mistake in them."""

    def __init__(self, program: Program, passes: Sequence[MicroBatch]) -> None:
        """Called before the step: weights and buffers are kept as they are now."""
        self.program = program
        self.passes = [replace(one, program=program) for one in passes]
        self.kept = {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def loss(self, mistake: Callable[[nn.Module], AbstractContextManager[None]]) -> float:
        """The step's mean loss while `mistake` is made in the module."""
        module = self.program.module
        for name, tensor in self._tensors():
            tensor.copy_(self.kept[name])
        sums = torch.zeros(2, dtype=torch.float64, device=self.program.world.device)
        for begin in self.program.on_begin:
            begin()
        with mistake(module):
            for one in (replace(one, sums=sums) for one in self.passes):
                with one.keyed_context():
                    one.compute_loss(one.outputs(module))
        total, count = sums.tolist()
        return float(total / count) if count else float("nan")

    @property
    def tokens(self) -> int:
        """The length of the step's first input along its second dim; 0 if it has none."""
        leaves = [t for t in pytree.tree_leaves(self.passes[0].parts[0]) if hasattr(t, "shape")]
        return leaves[0].shape[1] if leaves and leaves[0].dim() > 1 else 0

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.program.module.named_parameters()
        yield from self.program.module.named_buffers()


def step_again(evidence: Evidence) -> StepAgain:
    """The first wrong step; the one process is trained once more up to its end."""
    row = evidence.expected.rows[evidence.number]
    found: list[StepAgain] = []

    def watch(label: str, run: Run) -> None:
        if label != row.label:
            return
        passes = run.program.run

        def noted(now: Program, given: Sequence[Pass], reducer: Reducer) -> None:
            mine = [one for one in given if one.step + 1 == row.step]
            if mine:
                found.append(StepAgain(now, mine))
            passes(now, given, reducer)

        # Nothing is taken away from the module at the end: its generators stay keyed.
        run.program = replace(run.program, run=noted, on_close=())

    evidence.run_again(watch)
    return found[0]
