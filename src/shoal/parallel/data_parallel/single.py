"""One process: gradients stay where autograd puts them, and there is nobody to sum with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shoal.parallel.program import Program, whole_locals


def apply(program: Program) -> Program:
    """Give the program a reducer that only resets gradients."""
    return replace(
        program,
        reducer=LocalGradients(program.parameters),
        local=whole_locals(program),
    )


class LocalGradients:
    """The reducer of `single`; see `program.Reducer` for the order of calls."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    def begin(self, rounds: int) -> None:
        """Drop all gradients; autograd allocates them again."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def arm(self, last: bool, once: bool = True) -> None:
        """Nothing travels."""

    def passed(self, counted: bool) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """Nothing travels."""

    def used(self) -> list[bool]:
        """Which parameters got a gradient."""
        return [p.grad is not None for p in self.parameters.values()]

    def local_norms(self) -> list[torch.Tensor]:
        """Norms of all gradients, by one call per dtype and device."""
        return list(torch._foreach_norm(self.sums())) if self.sums() else []

    def publish(self) -> None:
        """The parameters themselves were stepped."""

    def sums(self) -> list[torch.Tensor]:
        """The gradients themselves."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def summed(self) -> list[str]:
        """The parameters that have one."""
        return [name for name, p in self.parameters.items() if p.grad is not None]
