"""Gradients of parameters that several parts of the model share are summed over those parts.

Data parallel sums a gradient over the ranks that hold the same part of the model. Some parameters
need one sum more: those that every rank of a tensor-parallel group holds whole while it sees a part
of the activations only (norms under sequence parallelism), those that two stages of a pipeline both
use (a tied embedding and head), and all of them where a pipeline holds two copies of the model
(dualpipe). All are summed once a step, after the sum over data ranks and in the same buffers, so
that every holder steps the same gradient.

    order      over tensor-parallel ranks first, then over stages: on every rank alike
    messages   what is summed over the same ranks travels together, in buckets; a buffer that fills
               one by itself travels as it lies
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal.fabric import World
from shoal.parallel.program import Local, Program, Reducer
from shoal.planner.buckets import BUCKET_BYTES


def apply(program: Program) -> Program:
    """Let the program's reducer finish with the sums over `program.joined`."""
    reducer = program.reducer
    if reducer is None or not program.joined:
        return program
    return replace(program, reducer=JoinedGradients(reducer, program.joined, program.local))


class JoinedGradients:
    """A reducer whose last act is one more sum; see `program.Reducer` for the order of calls.

    local   what this rank steps: where it computed no gradient, another holder may have
    """

    def __init__(
        self,
        inner: Reducer,
        joined: Mapping[str, tuple[World, ...]],
        local: Mapping[str, Local],
    ) -> None:
        self.inner, self.joined, self.local = inner, joined, local
        self.computed: list[bool] = []
        self.norms: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank, before any came from others."""
        return self.computed

    def local_norms(self) -> list[torch.Tensor]:
        """Norms before the sums here, which mix in what others computed."""
        return self.norms

    def finish(self) -> None:
        """Sum what was summed over data ranks once more."""
        self.inner.finish()
        self.computed, self.norms = self.inner.used(), self.inner.local_norms()
        for name in self.joined.keys() & self.local.keys():
            parameter = self.local[name].parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wanted: dict[tuple[int, tuple[int, ...], str], tuple[World, list[torch.Tensor]]] = {}
        for name, tensor in zip(self.inner.summed(), self.inner.sums(), strict=True):
            worlds = self.joined.get(name, ())
            # Counted from the last world, so that what has one only travels with what has two.
            for turn, world in enumerate(worlds, -len(worlds)):
                key = (turn, world.ranks, str(tensor.dtype))
                wanted.setdefault(key, (world, []))[1].append(tensor)
        # In the same order everywhere, so that no two ranks wait crosswise.
        for key in sorted(wanted):
            world, tensors = wanted[key]
            for message in _messages(tensors):
                _sum(world, message)


def _messages(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that travel together, in their order: at most a bucket's bytes, or one tensor."""
    message: list[torch.Tensor] = []
    held_bytes = 0
    for tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if message and held_bytes + size_bytes > BUCKET_BYTES:
            yield message
            message, held_bytes = [], 0
        message.append(tensor)
        held_bytes += size_bytes
    if message:
        yield message


def _sum(world: World, tensors: list[torch.Tensor]) -> None:
    """Sum tensors over a world, in place, as one message."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        world.sum(tensors[0])
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    world.sum(together)
    parts = together.split([tensor.numel() for tensor in tensors])
    for tensor, summed in zip(tensors, parts, strict=True):
        tensor.copy_(summed.view_as(tensor))
