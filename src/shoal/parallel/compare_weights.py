"""Make all ranks start from the same module: same names and shapes, same bits.

Every rank hashes its tensors (SHA-256). Ranks compare one digest of all, then one of each. A
different structure raises an error that names the first difference. Different values are replaced
by rank 0's, with one notice: a model that was built with an unseeded generator would otherwise
train as many different models.

Tensors that all ranks have mapped from one rank's files are equal. They are not read for the
comparison: under most layouts a rank needs only a part of them.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.wire.phases import iter_with_progress


def apply(program: Program) -> Program:
    """Compare the module across ranks and broadcast rank 0's values where they differ.

    Raises:
        PlanError: on all ranks, if names, shapes, dtypes, memory formats or frozen flags differ.
    """
    world, module = program.world, program.module
    if world.size == 1:
        return program
    tensors = named_tensors(module)
    structure = {
        n: [list(t.shape), str(t.dtype), t.requires_grad, list(t.stride())]
        for n, t in tensors.items()
    }
    unlike = world.find_differing_rank(structure)
    if unlike is not None:
        raise PlanError(_structure_line(*unlike))
    shared = _shared_tensor_names(tensors, world)
    read = {name: t for name, t in tensors.items() if name not in shared}
    own = iter_with_progress("compare weights", len(read), read.values())
    names = list(read)
    differing = [
        names[place] for place in world.find_differing_indices([_digest_prefix(t) for t in own])
    ]
    if differing:
        for name in differing:
            value = tensors[name].detach().contiguous().to(world.device)
            world.broadcast(value)
            tensors[name].data.copy_(value)
        program.notices.append(
            f"weights differ across ranks in {len(differing)} of {len(tensors)} tensors, first: "
            f"{differing[0]}; rank 0's are used (seed the generator before building the model)"
        )
    return program


def _shared_tensor_names(tensors: dict[str, torch.Tensor], world: World) -> set[str]:
    """Return names of tensors that all ranks of one machine have mapped from one rank's files."""
    if world.local_size < world.size:
        return set()
    from shoal.parallel.build.mmap_init import is_shared  # not needed with one process

    here = [name for name, tensor in tensors.items() if is_shared(tensor)]
    return set(here) if world.find_differing_rank(here) is None else set()


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row order, 64 hex digits, without its shape."""
    raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()


def _digest_prefix(tensor: torch.Tensor) -> int:
    """Return the first 64 bits of a tensor's digest as a signed integer."""
    return int.from_bytes(bytes.fromhex(tensor_digest(tensor)[:16]), "big", signed=True)


def _structure_line(rank: int, first: dict[str, Any], other: dict[str, Any]) -> str:
    for name in [*first, *other]:
        here, there = first.get(name), other.get(name)
        if here != there:
            strides = here is not None and there is not None and here[:3] == there[:3]
            return (
                f"model: {name} is {_describe_tensor(here, strides)} on rank 0 and "
                f"{_describe_tensor(there, strides)} on rank {rank}; every rank must build the "
                "same "
                f"model: look for a builder that reads the rank or the environment"
            )
    return f"model: ranks 0 and {rank} name the same parameters in another order"


def _describe_tensor(entry: list[object] | None, with_strides: bool) -> str:
    if entry is None:
        return "missing"
    shape, dtype, trains, strides = entry
    kept = f", strides {strides} (memory format)" if with_strides else ""
    return f"{shape} {dtype}{'' if trains else ', frozen'}{kept}"


def refuse_shared_memory(module: nn.Module, layout: str) -> None:
    """Raise PlanError for two weights in one memory (`a.data = b.data`) where ranks step parts.

    Each would get a memory of its own, so that they train apart.

    Args:
        module: the whole model.
        layout: as a line.

    Raises:
        PlanError: names both weights.
    """
    spans: list[tuple[int, int, int, str]] = []
    for name, p in module.named_parameters():
        if not p.is_meta and p.numel():
            memory, start = p.untyped_storage().data_ptr(), int(p.storage_offset())
            size = 1 + sum(int((n - 1) * by) for n, by in zip(p.shape, p.stride(), strict=True))
            spans.append((memory, start, start + size, name))
    for (memory, _, stop, one), (other_memory, start, _, other) in pairwise(sorted(spans)):
        if memory == other_memory and start < stop:
            raise PlanError(
                f"model: {one} and {other} are two weights in one memory (a.data = b.data), and "
                f"layout {layout} moves each to its own "
                f"memory, so they would train apart; try: one weight, as a.weight = b.weight"
            )
