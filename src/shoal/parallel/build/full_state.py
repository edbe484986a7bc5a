"""This rank's parts of a program's state, and whole tensors gathered from all ranks.

Other packages never see distributed tensors: checkpoints are written from `local_state`, proofs and
exports read `gather_weights` and `iterate_gradients`.
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
from shoal.planning.gradient_buckets import pack_messages


def local_state(program: Program) -> dict[str, Part]:
    """Return this rank's parts of all parameters and persistent buffers, by first name.

    Tensors of other pipeline stages are left out.

    Raises:
        ConfigError: the module's state contains an object that is no tensor.
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
            continue  # of another stage
        if name in program.parts:
            found[name] = program.parts[name]
        elif name in program.cuts:
            found[name] = (value.detach(), program.shard_of(name))
        else:
            found[name] = (value.detach(), Shard.whole(name, tuple(value.shape), dtype_of(value)))
    return found


def gather_weights(program: Program, *, only_first: bool = False) -> dict[str, torch.Tensor]:
    """Gather every parameter and persistent buffer whole on the CPU of every rank; all call it.

    Args:
        only_first: gather on rank 0 only; the others get {} and spend no memory or time on it.
    """
    return assemble_tensors(local_state(program), program.world, only_first=only_first)


def iterate_weights(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather whole weights and persistent buffers one at a time on rank 0; all iterate together."""
    parts = local_state(program)
    return _iterate_tensors(
        _gather_spreads(parts, program.world), parts, program.world, only_first=True
    )


def iterate_gradients(program: Program) -> tuple[Iterator[tuple[str, torch.Tensor]], set[str]]:
    """Gather whole gradients one at a time on rank 0; all ranks iterate together.

    Returns:
        (iterator of (name, gradient), which yields nothing on other ranks; names that have one).
        Before `update`, and after a skipped step, gradients are sums over targets (under fp16
        scaled), and all names have one. After `update` they are the clipped mean, and names that
        no rank used have none. A missing gradient is yielded as zeros.
    """
    parts, used = _local_gradients(program)
    known = _gather_spreads(parts, program.world)
    return _iterate_tensors(known, parts, program.world, only_first=True), used


def _local_gradients(program: Program) -> tuple[dict[str, Part], set[str]]:
    """Return this rank's gradient parts, and the names that any rank used."""
    parts: dict[str, Part] = {}
    used: list[str] = []
    for name, local in program.local.items():
        gradient = local.parameter.grad
        if gradient is not None:
            used.append(name)
        kept = torch.zeros_like(local.parameter) if gradient is None else gradient
        parts[name] = (kept.detach(), local.shard)
    return parts, {name for told in program.world.gather_json(used) for name in told}


def assemble_tensors(
    parts: Mapping[str, Part], world: World, *, only_first: bool = False
) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the ranks' parts, on the CPU of every rank; all ranks call it.

    Args:
        parts: by name: a tensor and its position in the whole; a rank may hold nothing of a name.
        only_first: assemble on rank 0 only, to which the others send; they get {}.

    Returns:
        Copies by name, in the order of the lowest rank that has a name. Overlapping parts are
        assumed to be equal.
    """
    known = _gather_spreads(parts, world)
    found = {
        name: tensor.to("cpu", copy=known[name].is_replicated)
        for name, tensor in _iterate_tensors(known, parts, world, only_first)
    }
    return {name: found[name] for name in known if name in found}


def _gather_spreads(parts: Mapping[str, Part], world: World) -> dict[str, _TensorSpread]:
    """Gather which boxes of each tensor every rank holds; all ranks call it."""
    mine = {
        name: [
            list(shard.global_shape),
            shard.dtype,
            [list(map(list, box)) for box in shard.slices],
        ]
        for name, (_, shard) in parts.items()
    }
    known: dict[str, _TensorSpread] = {}
    for rank, told in enumerate(world.gather_json(mine)):
        for name, (shape, dtype, boxes) in told.items():
            spread = known.setdefault(name, _TensorSpread(tuple(shape), dtype, [()] * world.size))
            spread.boxes[rank] = tuple(tuple((first, end) for first, end in box) for box in boxes)
    return known


def _iterate_tensors(
    known: Mapping[str, _TensorSpread], parts: Mapping[str, Part], world: World, only_first: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather and yield full tensors one by one, with one message of them in memory at a time.

    Every rank must iterate to the end. A tensor that every rank holds whole is yielded as it is, on
    its device, without a copy.
    """
    for_me = world.is_first or not only_first
    travelling: list[str] = []
    for name, spread in known.items():
        if not spread.is_replicated:
            travelling.append(name)
        elif for_me:
            yield name, parts[name][0].detach().reshape(spread.shape)
    for together in _group_messages(travelling, known):
        spreads = {name: known[name] for name in together}
        message = _pack_message(spreads, parts, world)
        rows = world.gather(message) if only_first else world.all_gather(message)
        if rows is not None:
            found = {name: torch.zeros(s.shape, dtype=s.kind) for name, s in spreads.items()}
            _unpack_messages(spreads, rows.cpu(), found)
            del rows
            yield from found.items()


MESSAGE_BYTES = 32 * 2**20
"""Most bytes of a message of several tensors: latency dominates small collectives."""


@dataclass(frozen=True)
class _TensorSpread:
    """Boxes of one tensor that each rank holds."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[tuple[Box, ...]]

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def is_replicated(self) -> bool:
        whole = (tuple((0, length) for length in self.shape),)
        return all(boxes == whole for boxes in self.boxes)

    def sent(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank sends; of equal replicas only the lowest rank sends."""
        return () if self.boxes[rank] in self.boxes[:rank] else self.boxes[rank]

    def elements(self, rank: int) -> int:
        return sum(math.prod(end - first for first, end in box) for box in self.sent(rank))


def _group_messages(
    names: Iterable[str], known: Mapping[str, _TensorSpread]
) -> Iterator[list[str]]:
    """Yield runs of names of one dtype, of `MESSAGE_BYTES` unless one tensor is larger."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(known[name].dtype, []).append(name)
    for run in by_kind.values():
        sizes = [math.prod(known[name].shape) * known[name].kind.itemsize for name in run]
        yield from pack_messages(run, sizes, MESSAGE_BYTES)


def _pack_message(
    spreads: Mapping[str, _TensorSpread], parts: Mapping[str, Part], world: World
) -> torch.Tensor:
    """Return this rank's message of some tensors of one dtype: [elements], equal on all ranks."""
    kind = next(iter(spreads.values())).kind
    longest = max(sum(s.elements(rank) for s in spreads.values()) for rank in range(world.size))
    message = torch.zeros(longest, dtype=kind, device=world.device)
    place = 0
    for name, spread in spreads.items():
        if count := spread.elements(world.rank):
            message[place : place + count] = parts[name][0].detach().reshape(-1)
            place += count
    return message


def _unpack_messages(
    spreads: Mapping[str, _TensorSpread], rows: torch.Tensor, found: Mapping[str, torch.Tensor]
) -> None:
    """Write the ranks' messages, [ranks, elements], into the whole tensors."""
    for rank, row in enumerate(rows):
        place = 0
        for name, spread in spreads.items():
            for box in spread.sent(rank):
                place = _fill_box(found[name], box, row, place)


def _fill_box(out: torch.Tensor, box: Box, row: torch.Tensor, place: int) -> int:
    target = out[tuple(slice(start, stop) for start, stop in box)]
    target.copy_(row[place : place + target.numel()].view(target.shape))
    return place + target.numel()
