"""What a program holds of its model, part by part, and whole tensors put together again.

Other rooms never see distributed tensors: checkpoints are written from `held`, proofs and exports
read `gather_weights` and `gather_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.base.errors import ConfigError
from shoal.base.shards import Box, Shard
from shoal.fabric import World
from shoal.parallel.program import Part, Program, dtype_of


def held(program: Program) -> dict[str, Part]:
    """Parameters and persistent buffers by first name, each as the part that this rank holds.

    What belongs to other stages of a pipeline is left out.

    Errors: ConfigError for a module whose state holds something that is no tensor.
    """
    found: dict[str, Part] = {}
    for name, value in program.module.state_dict(keep_vars=True).items():
        if name in program.aliases:
            continue
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"model: {name} keeps a {type(value).__name__} in its state; tensors can be saved "
                f"(register_buffer), other objects cannot"
            )
        if value.is_meta:
            continue  # another stage's
        if name in program.parts:
            found[name] = program.parts[name]
        elif name in program.places:
            found[name] = (value.detach(), program.places[name])
        else:
            found[name] = (value.detach(), Shard.whole(name, tuple(value.shape), dtype_of(value)))
    return found


def gather_weights(program: Program) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole, on the CPU of every rank."""
    return assembled(held(program), program.world)


def gather_gradients(program: Program) -> tuple[dict[str, torch.Tensor], set[str]]:
    """(whole gradients by name on the CPU of every rank, names that any rank used).

    After `update` they are the clipped mean gradient; a parameter that nobody used has zeros.
    """
    parts: dict[str, Part] = {}
    used: list[str] = []
    for name, local in program.local.items():
        gradient = local.parameter.grad
        if gradient is not None:
            used.append(name)
        kept = torch.zeros_like(local.parameter) if gradient is None else gradient
        parts[name] = (kept.detach(), local.shard)
    by_any = {name for told in program.world.gather_json(used) for name in told}
    return assembled(parts, program.world), by_any


def assembled(parts: Mapping[str, Part], world: World) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU of every rank; a rank may hold nothing of some, others nothing else.

    Order: as the lowest rank that has a name lists it.
    """
    mine = {name: (list(shard.global_shape), shard.dtype) for name, (_, shard) in parts.items()}
    known: dict[str, tuple[list[int], str]] = {}
    for told in world.gather_json(mine):
        for name, (shape, dtype) in told.items():
            known.setdefault(name, (shape, dtype))
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in known.items():
        part = parts.get(name)
        if part is None:
            nothing = torch.zeros(0, dtype=getattr(torch, dtype), device=world.device)
            part = (nothing, Shard(name, tuple(shape), dtype, ()))
        found[name] = whole(part, world)
    return found


def whole(part: Part, world: World) -> torch.Tensor:
    """Put a tensor together from every rank's part; where parts overlap they are replicas."""
    tensor, shard = part
    everyone = world.gather_json([[list(map(list, box)) for box in shard.slices], tensor.numel()])
    boxes = [tuple(tuple(tuple(span) for span in box) for box in told[0]) for told in everyone]
    complete = tuple((0, n) for n in shard.global_shape)
    if all(slices == (complete,) for slices in boxes):
        return tensor.detach().reshape(shard.global_shape).to("cpu", copy=True)
    longest = max(told[1] for told in everyone)
    padded = torch.zeros(longest, dtype=getattr(torch, shard.dtype), device=world.device)
    padded[: tensor.numel()] = tensor.reshape(-1)
    out = torch.zeros(shard.global_shape, dtype=padded.dtype)
    for slices, row in zip(boxes, world.gather(padded).cpu(), strict=True):
        place = 0
        for box in slices:
            place = _fill(out, box, row, place)
    return out


def _fill(out: torch.Tensor, box: Box, row: torch.Tensor, place: int) -> int:
    target = out[tuple(slice(start, stop) for start, stop in box)]
    target.copy_(row[place : place + target.numel()].view(target.shape))
    return place + target.numel()
