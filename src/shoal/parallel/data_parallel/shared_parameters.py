"""All-reduce gradients of parameters that several parts of one model share, over those parts.

Data parallel sums a gradient over the ranks that hold the same part of the model. Some parameters
need one sum more:

    tp   those that every rank of a group holds whole while it sees only a part of the activations
         (norms under sequence parallelism)
    cp   all parameters
    pp   those that two stages both use (a tied embedding and head), or all if a pipeline holds two
         copies of the model (dualpipe)

All are summed once a step, after the sum over data ranks and in the same buffers, so that every
holder steps the same gradient.

    order      tensor-parallel ranks first, then stages (`Placement.sum_over`), on every rank
    messages   tensors that are summed over the same ranks share messages, in buckets; a tensor that
               fills one by itself is sent without a copy
"""

from __future__ import annotations

import torch

from shoal.fabric import World
from shoal.parallel.program import Program, Reducer
from shoal.planning.gradient_buckets import BUCKET_BYTES, pack_messages


def all_reduce_shared_gradients(program: Program, reducer: Reducer) -> None:
    """All-reduce the reducer's gradients in place over tp, cp and pp ranks that share parameters.

    Every rank calls it once a step, after `reducer.finish()` has summed over data ranks. Read
    `reducer.used()` and `.local_norms()` before: afterwards they include other ranks' gradients.
    """
    shared = {name for name, worlds in program.sums.items() if len(worlds) > 1}
    for name in shared & program.local.keys():
        parameter = program.local[name].parameter
        if parameter.grad is None:  # this rank computed none; another holder may have
            parameter.grad = torch.zeros_like(parameter)
    wanted: dict[tuple[int, tuple[int, ...], str], tuple[World, list[torch.Tensor]]] = {}
    for name, tensor in zip(reducer.summed_names(), reducer.sums(), strict=True):
        worlds = program.sums[name][1:]
        # Counted from the last world, so that tensors with one world join those with two.
        for turn, world in enumerate(worlds, -len(worlds)):
            key = (turn, world.ranks, str(tensor.dtype))
            wanted.setdefault(key, (world, []))[1].append(tensor)
    # In the same order on every rank, so that no two ranks deadlock.
    for key in sorted(wanted):
        world, tensors = wanted[key]
        for message in pack_messages(tensors, [t.nbytes for t in tensors], BUCKET_BYTES):
            all_reduce_message(world, message)


def all_reduce_message(world: World, tensors: list[torch.Tensor]) -> None:
    """Sum tensors over a world, in place, as one message."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        world.all_reduce(tensors[0])
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    world.all_reduce(together)
    parts = together.split([tensor.numel() for tensor in tensors])
    for tensor, summed in zip(tensors, parts, strict=True):
        tensor.copy_(summed.view_as(tensor))
