"""What a program holds of its model, part by part, and whole tensors put together again.

Other rooms never see distributed tensors: checkpoints are written from `held`, proofs and exports
read `gather_weights` and `gather_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from shoal.base.errors import ConfigError
from shoal.base.plans.tensor_shards import Box, Shard
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
        elif name in program.cuts:
            found[name] = (value.detach(), program.place(name))
        else:
            found[name] = (value.detach(), Shard.whole(name, tuple(value.shape), dtype_of(value)))
    return found


def gather_weights(program: Program, *, only_first: bool = False) -> dict[str, torch.Tensor]:
    """Gather every parameter and persistent buffer whole on the CPU of every rank; all call it.

    Args:
        only_first: on rank 0's alone; others get {} and spend neither memory nor time on it.
    """
    return assembled(held(program), program.world, only_first=only_first)


def each_weight(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """`gather_weights` on rank 0 alone, one tensor at a time; all ranks go through it, in step."""
    parts = held(program)
    return _each(_spreads(parts, program.world), parts, program.world, only_first=True)


def each_gradient(program: Program) -> tuple[Iterator[tuple[str, torch.Tensor]], set[str]]:
    """`gather_gradients` on rank 0 alone, one at a time, as (tensors, names that have one)."""
    parts, used = _gradients(program)
    known = _spreads(parts, program.world)
    return _each(known, parts, program.world, only_first=True), used


def gather_gradients(
    program: Program, *, only_first: bool = False
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Gather whole gradients: (by name, on the CPU of every rank; names that have one).

    Every rank calls it; under `only_first` none but rank 0 gets gradients, all get the names.
    Before `update`, and after a skipped step, they are sums over targets (under fp16 scaled), and
    all names have one; after `update` the clipped mean gradient, and names that no rank used have
    none. Without one the gradient is zeros.
    """
    parts, used = _gradients(program)
    return assembled(parts, program.world, only_first=only_first), used


def _gradients(program: Program) -> tuple[dict[str, Part], set[str]]:
    """This rank's parts, and the names that any rank used."""
    parts: dict[str, Part] = {}
    used: list[str] = []
    for name, local in program.local.items():
        gradient = local.parameter.grad
        if gradient is not None:
            used.append(name)
        kept = torch.zeros_like(local.parameter) if gradient is None else gradient
        parts[name] = (kept.detach(), local.shard)
    return parts, {name for told in program.world.gather_json(used) for name in told}


def assembled(
    parts: Mapping[str, Part], world: World, *, only_first: bool = False
) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the ranks' parts, on the CPU of every rank; all ranks call it.

    Args:
        parts: by name: a tensor and where it lies in the whole; a rank may hold nothing of a name.
        only_first: on rank 0 alone, to which the others send; they get {}.

    Returns:
        copies by name, in the order of the lowest rank that has a name. Where parts overlap they
        are taken to be equal.
    """
    known = _spreads(parts, world)
    found = {
        name: tensor.to("cpu", copy=known[name].everywhere)
        for name, tensor in _each(known, parts, world, only_first)
    }
    return {name: found[name] for name in known if name in found}


def _spreads(parts: Mapping[str, Part], world: World) -> dict[str, _Spread]:
    """Which boxes of what each rank holds; all ranks call it."""
    mine = {
        name: [
            list(shard.global_shape),
            shard.dtype,
            [list(map(list, box)) for box in shard.slices],
        ]
        for name, (_, shard) in parts.items()
    }
    known: dict[str, _Spread] = {}
    for rank, told in enumerate(world.gather_json(mine)):
        for name, (shape, dtype, boxes) in told.items():
            spread = known.setdefault(name, _Spread(tuple(shape), dtype, [()] * world.size))
            spread.boxes[rank] = tuple(tuple((first, end) for first, end in box) for box in boxes)
    return known


def _each(
    known: Mapping[str, _Spread], parts: Mapping[str, Part], world: World, only_first: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give `assembled`'s tensors one by one: memory holds a message's worth of them.

    Every rank must go through it to the end. What every rank holds whole is given as it is held,
    on its device, and is no copy.
    """
    for_me = world.is_first or not only_first
    travelling: list[str] = []
    for name, spread in known.items():
        if not spread.everywhere:
            travelling.append(name)
        elif for_me:
            yield name, parts[name][0].detach().reshape(spread.shape)
    for together in _in_messages(travelling, known):
        spreads = {name: known[name] for name in together}
        message = _message(spreads, parts, world)
        rows = world.gather(message) if only_first else world.all_gather(message)
        if rows is not None:
            found = {name: torch.zeros(s.shape, dtype=s.kind) for name, s in spreads.items()}
            _spread_out(spreads, rows.cpu(), found)
            del rows
            yield from found.items()


MESSAGE_BYTES = 32 * 2**20
"""Up to this size tensors travel together: a collective costs more than a small one's bytes."""


@dataclass(frozen=True)
class _Spread:
    """Which boxes of one tensor each rank holds."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[tuple[Box, ...]]

    @property
    def kind(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def everywhere(self) -> bool:
        whole = (tuple((0, length) for length in self.shape),)
        return all(boxes == whole for boxes in self.boxes)

    def sent(self, rank: int) -> tuple[Box, ...]:
        """What this rank sends: of equal replicas the lowest rank's."""
        return () if self.boxes[rank] in self.boxes[:rank] else self.boxes[rank]

    def elements(self, rank: int) -> int:
        return sum(math.prod(end - first for first, end in box) for box in self.sent(rank))


def _in_messages(names: Iterable[str], known: Mapping[str, _Spread]) -> Iterator[list[str]]:
    """Cut the names into runs of one dtype, of `MESSAGE_BYTES` unless one tensor is larger."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(known[name].dtype, []).append(name)
    for run in by_kind.values():
        message: list[str] = []
        size_bytes = 0
        for name in run:
            one_bytes = math.prod(known[name].shape) * known[name].kind.itemsize
            if message and size_bytes + one_bytes > MESSAGE_BYTES:
                yield message
                message, size_bytes = [], 0
            message.append(name)
            size_bytes += one_bytes
        yield message


def _message(
    spreads: Mapping[str, _Spread], parts: Mapping[str, Part], world: World
) -> torch.Tensor:
    """What this rank sends of some tensors of one dtype: [elements], equally long on all ranks."""
    kind = next(iter(spreads.values())).kind
    longest = max(sum(s.elements(rank) for s in spreads.values()) for rank in range(world.size))
    message = torch.zeros(longest, dtype=kind, device=world.device)
    place = 0
    for name, spread in spreads.items():
        if count := spread.elements(world.rank):
            message[place : place + count] = parts[name][0].detach().reshape(-1)
            place += count
    return message


def _spread_out(
    spreads: Mapping[str, _Spread], rows: torch.Tensor, found: Mapping[str, torch.Tensor]
) -> None:
    """Write the ranks' messages, [ranks, elements], where they belong."""
    for rank, row in enumerate(rows):
        place = 0
        for name, spread in spreads.items():
            for box in spread.sent(rank):
                place = _fill(found[name], box, row, place)


def _fill(out: torch.Tensor, box: Box, row: torch.Tensor, place: int) -> int:
    target = out[tuple(slice(start, stop) for start, stop in box)]
    target.copy_(row[place : place + target.numel()].view(target.shape))
    return place + target.numel()
