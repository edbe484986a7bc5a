"""Find weights beside the run that a written-out pass trains: of its loss, or of its inputs.

    codes(place) + x → model → projector → loss      codes and projector are no weights of the run

`run.backward` adds up sums over all micro-batches, and `run.update` divides the gradients of the
model alone. Those of another leaf stay sums, and each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.guards import reports
from shoal.trainer.guards.external_writes import is_watched
from shoal.trainer.guards.first_step_checks import list_foreign_leaves


class PassLeavesCheck:
    """Check of the first loss of a rank's first micro-batches.

    Args:
        program: the run's.
        notice: prints a line of this rank.
    """

    def __init__(self, program: Program, notice: Callable[[str], None]) -> None:
        self.program, self.notice = program, notice
        self.outputs: list[Any] = []
        self.inputs: list[torch.Tensor] = []
        self._is_over = False

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Keep inputs and outputs of the model's calls inside."""
        if self._is_over:
            yield
            return
        hook = self.program.module.register_forward_hook(self._keep, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self.outputs.clear()
            self.inputs.clear()

    def _keep(self, _module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self.outputs.append(outputs)
            leaves = pytree.tree_leaves((args, kwargs))
            self.inputs += [
                one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad
            ]

    def check(self, loss: torch.Tensor) -> None:
        """Print a line if a loss, or what the model was called with, has weights of its own."""
        if self._is_over:
            return
        found: dict[int, torch.Tensor] = {}
        for root in (loss, *self.inputs):
            leaves = list_foreign_leaves(root, self.outputs, self.program)
            found |= {id(leaf): leaf for leaf in (*leaves, root) if _is_weight(leaf)}
        foreign = [leaf for leaf in found.values() if not is_watched(leaf)]
        if foreign:
            self._is_over = True
            self.notice(reports.first_step_report.foreign_line(foreign))


def _is_weight(leaf: torch.Tensor) -> bool:
    """Return whether a tensor is trained: a parameter, or a leaf without dims."""
    return leaf.is_leaf and (isinstance(leaf, nn.Parameter) or not leaf.ndim)
