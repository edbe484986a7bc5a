"""All-reduce gradients of parameters that several parts of one model share, over those parts.

Data parallel sums a gradient over the ranks that hold the same part of the model. Some parameters
need one sum more: those that every rank of a tensor-parallel group holds whole while it sees a part
of the activations only (norms under sequence parallelism), all of them under context parallelism,
those that two stages of a pipeline both use (a tied embedding and head), and all of them where a
pipeline holds two copies of the model (dualpipe). All are summed once a step, after the sum over
data ranks and in the same buffers, so that every holder steps the same gradient.

    order      tensor-parallel ranks first, then stages (`Placement.sum_over`): on every rank alike
    messages   what is summed over the same ranks travels together, in buckets; a buffer that fills
               one by itself travels as it lies
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.fabric import World
from shoal.parallel.program import Program, Reducer
from shoal.planning.gradient_buckets import BUCKET_BYTES


def sum_shared(program: Program, reducer: Reducer) -> None:
    """All-reduce the reducer's gradients in place over tp, cp and pp ranks that share parameters.

    Called once a step, by every rank, after `reducer.finish()` has summed them over data ranks.

    After it `reducer.used()` and `.local_norms()` mix in what others computed: ask before.
    """
    shared = {name for name, worlds in program.sums.items() if len(worlds) > 1}
    for name in shared & program.local.keys():
        parameter = program.local[name].parameter
        if parameter.grad is None:  # this rank computed none; another holder may have
            parameter.grad = torch.zeros_like(parameter)
    wanted: dict[tuple[int, tuple[int, ...], str], tuple[World, list[torch.Tensor]]] = {}
    for name, tensor in zip(reducer.summed(), reducer.sums(), strict=True):
        worlds = program.sums[name][1:]
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
        world.all_reduce(tensors[0])
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    world.all_reduce(together)
    parts = together.split([tensor.numel() for tensor in tensors])
    for tensor, summed in zip(tensors, parts, strict=True):
        tensor.copy_(summed.view_as(tensor))
