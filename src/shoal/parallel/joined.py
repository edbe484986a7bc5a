"""Gradients of parameters that several parts of the model share are summed over those parts.

Data parallel sums a gradient over the ranks that hold the same part of the model. Two kinds of
parameters need one sum more: those that every rank of a tensor-parallel group holds whole while it
sees a part of the activations only (norms under sequence parallelism), and those that two stages
of a pipeline both use (a tied embedding and head). Both are summed once a step, after the sum over
data ranks and in the same buffers, so that every holder steps the same gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shoal.fabric import World
from shoal.parallel.program import Program, Reducer


def apply(program: Program) -> Program:
    """Let the program's reducer finish with the sums over `program.joined`."""
    reducer = program.reducer
    if reducer is None or not program.joined:
        return program
    return replace(program, reducer=JoinedGradients(reducer, program.joined))


class JoinedGradients:
    """A reducer whose last act is one more sum; see `program.Reducer` for the order of calls."""

    def __init__(self, inner: Reducer, joined: dict[str, tuple[World, ...]]) -> None:
        self.inner, self.joined = inner, joined

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def finish(self) -> None:
        """Sum what was summed over data ranks once more, a world and a format in one message."""
        self.inner.finish()
        wanted: dict[tuple[tuple[int, ...], torch.dtype], tuple[World, list[torch.Tensor]]] = {}
        for name, tensor in zip(self.inner.summed(), self.inner.sums(), strict=True):
            for world in self.joined.get(name, ()):
                key = (world.ranks, tensor.dtype)
                wanted.setdefault(key, (world, []))[1].append(tensor)
        # In the same order everywhere, so that no two ranks wait crosswise.
        for key in sorted(wanted, key=str):
            world, tensors = wanted[key]
            together = torch.cat([tensor.reshape(-1) for tensor in tensors])
            world.sum(together)
            for tensor, summed in zip(
                tensors, together.split([t.numel() for t in tensors]), strict=True
            ):
                tensor.copy_(summed.view_as(tensor))
