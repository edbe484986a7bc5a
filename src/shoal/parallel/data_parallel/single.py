"""One process: gradients stay where autograd puts them, and there are no ranks to sum over."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shoal.parallel.program import IdleReducer, Program, whole_local_parameters


def apply(program: Program) -> Program:
    """Give the program a reducer that only resets gradients."""
    return replace(
        program,
        reducer=LocalGradients(program.parameters),
        local=whole_local_parameters(program),
    )


class LocalGradients(IdleReducer):
    """The reducer of `single`; see `program.Reducer` for the order of calls."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    def start_step(self, rounds: int) -> None:
        """Drop all gradients; autograd allocates them again."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def used_parameters(self) -> list[bool]:
        """Return per parameter whether it got a gradient."""
        return [p.grad is not None for p in self.parameters.values()]

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norms of all gradients, by one call per dtype and device."""
        return list(torch._foreach_norm(self.sums())) if self.sums() else []

    def sums(self) -> list[torch.Tensor]:
        """Return the gradients themselves."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def summed_names(self) -> list[str]:
        """Return the names of the parameters that have a gradient."""
        return [name for name, p in self.parameters.items() if p.grad is not None]
