"""From what each rank holds to what each rank writes: offers, the deal, and bytes in host memory.

A piece is a shard with its data; a block is one slice of one piece that this rank was dealt. All
ranks gather all offers (names and boxes, no data) and compute the same deal from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.base.errors import CheckpointError
from shoal.base.shards import Box, Shard
from shoal.checkpoint import boxes
from shoal.checkpoint.deal import Offer, deal
from shoal.checkpoint.exchange import exchange
from shoal.checkpoint.tensorfile import DTYPES
from shoal.fabric import World


@dataclass(frozen=True)
class Piece:
    """A shard and its data: the slices' elements in order, row by row, in any shape and device."""

    shard: Shard
    data: torch.Tensor


@dataclass(frozen=True)
class Block:
    """One slice that this rank holds; `data` is flat, and in host memory once it is dealt."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    data: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's own, and the slice where that is not all of it."""
        if self.box == boxes.whole(self.global_shape):
            return self.name
        return boxes.label(self.name, self.box, self.global_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The slice's own shape."""
        return tuple(stop - start for start, stop in self.box)

    def memory(self) -> memoryview:
        """The bytes of the slice, not copied."""
        return self.data.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Collected:
    """What this rank writes, and what all ranks know: bytes and slices of all, tied names."""

    blocks: list[Block]
    total_bytes: int
    slices: int
    aliases: dict[str, str]


def collect(pieces: Sequence[Piece], aliases: Mapping[str, str], world: World) -> Collected:
    """Agree who writes what, and bring this rank's share to host memory. Every rank calls it.

    Data already in host memory is not copied: it must not change until it is written.
    Errors: RankFailed on all ranks for a piece that contradicts its shard or another rank's.
    """
    held: dict[tuple[str, Box], Block] = {}
    answers = exchange(world, lambda: _offer(pieces, aliases, held))
    collected: list[Collected] = []
    exchange(world, lambda: collected.append(_settle(answers, held, world.rank)))
    return collected[0]


def _offer(
    pieces: Sequence[Piece], aliases: Mapping[str, str], held: dict[tuple[str, Box], Block]
) -> dict[str, Any]:
    for piece in pieces:
        for block in _cut(piece) if piece.shard.name not in aliases else ():
            if (block.name, block.box) in held:
                raise CheckpointError(f"{block.key} is offered twice by one rank")
            held[block.name, block.box] = block
    offers = [(b.name, b.global_shape, b.dtype, b.box) for b in held.values()]
    return {"offers": offers, "aliases": dict(aliases)}


def _settle(
    answers: Sequence[dict[str, Any]], held: Mapping[tuple[str, Box], Block], rank: int
) -> Collected:
    dealt = deal([[_from_json(fields) for fields in answer["offers"]] for answer in answers])
    names = {name for share in dealt.shares for name, _ in share}
    tied: dict[str, str] = {}
    for answer in answers:
        tied.update(answer["aliases"])
    for alias, name in tied.items():
        if name not in names or alias in names:
            raise CheckpointError(
                f"{alias} is tied to {name}: the second must be offered by a rank, the first not"
            )
    blocks = [_to_host(held[key]) for key in dealt.shares[rank]]
    return Collected(blocks, dealt.total_bytes, sum(map(len, dealt.shares)), tied)


def _from_json(fields: Sequence[Any]) -> Offer:
    name, shape, dtype, box = fields
    return name, tuple(shape), dtype, tuple((start, stop) for start, stop in box)


def _cut(piece: Piece) -> list[Block]:
    """The piece's slices; empty ones only for tensors that are empty themselves."""
    shard, data = piece.shard, piece.data.detach().reshape(-1)
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype != shard.dtype or data.numel() != shard.elements:
        raise CheckpointError(
            f"{shard.name}: the data has {data.numel()} elements of {dtype}, "
            f"its shard {shard.elements} of {shard.dtype}"
        )
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{shard.name}: dtype {dtype} cannot be saved; a checkpoint holds {', '.join(DTYPES)}"
        )
    blocks: list[Block] = []
    position = 0
    for box in shard.slices:
        count = boxes.elements(box)
        if count or 0 in shard.global_shape:
            part = data[position : position + count]
            blocks.append(Block(shard.name, shard.global_shape, dtype, box, part))
        position += count
    return blocks


def _to_host(block: Block) -> Block:
    host = block.data.cpu().contiguous()
    return Block(block.name, block.global_shape, block.dtype, block.box, host)
