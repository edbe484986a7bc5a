"""Proves once, at the first real update, that the optimizer trains this model and no copy of it."""

from __future__ import annotations

import math

import torch
from torch import nn

from shoal.parallel.program import Program


def _stepped(program: Program) -> list[nn.Parameter]:
    return [local.parameter for local in program.local.values()]


class MovementCheck:
    """Proves once that the optimizer trains this model: some parameter with a gradient must move.

    An optimizer that keeps its own copies, built before a model was cast or moved, steps happily
    over tensors that nobody uses. Before the first real update a few small parameters are copied,
    of those whose update cannot vanish in rounding; after it one of them must differ. Updates that
    may vanish (a warm-up that starts at lr 1e-9) prove nothing and are waited out.
    """

    WATCHED, WATCHED_BYTES = 8, 2**20

    def __init__(self) -> None:
        self.done = False
        self.before: list[tuple[nn.Parameter, torch.Tensor]] = []

    def look(self, program: Program, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are final: remember the smallest parameters that must move now."""
        lr_of: dict[int, float] = {}
        for group in optimizer.param_groups:
            lr_of.update({id(p): float(group.get("lr", 1.0) or 0.0) for p in group["params"]})
        self.before = []
        for parameter in sorted(_stepped(program), key=lambda p: p.numel()):
            gradient, lr = parameter.grad, lr_of.get(id(parameter), 0.0)
            if gradient is None or not parameter.numel():
                continue
            copied_bytes = sum(old.nbytes for _, old in self.before)
            if copied_bytes and copied_bytes + parameter.nbytes > self.WATCHED_BYTES:
                return  # a model of few large tensors would be copied whole
            # Plain descent moves by lr · gradient, normalised methods by about lr.
            reach = lr * min(1.0, float(torch.linalg.vector_norm(gradient, math.inf)))
            largest = float(torch.linalg.vector_norm(parameter.detach(), math.inf))
            lost = 8 * torch.finfo(parameter.dtype).eps * largest
            if reach > lost:
                self.before.append((parameter, parameter.detach().clone()))
            if len(self.before) == self.WATCHED:
                return

    def moved(self) -> bool | None:
        """After the update: did a watched parameter move? None if none was worth watching."""
        watched, self.before = self.before, []
        if not watched:
            return None
        self.done = True
        return any(not torch.equal(p.detach(), old) for p, old in watched)
