"""From what each rank holds to what each rank writes: offers, the agreement, and this rank's share.

A piece is a shard with its data; a block is one slice of one piece. All ranks gather all offers
(names and boxes, no data) and compute the same deal from them. What is offered hardly ever changes
during a run, so the agreement may be kept: it holds until some rank offers something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES, Box, Shard
from shoal.checkpoint.agreement.assign_slices import Offer, deal
from shoal.checkpoint.agreement.collective_phase import exchange
from shoal.checkpoint.format import boxes
from shoal.checkpoint.format.manifest import plain
from shoal.fabric import World

SLICE_BYTES = 600
"""Room for one slice in header and manifest, generous: the space check errs early, not late."""

Key = tuple[str, Box]
"""What names a block: its tensor and its slice."""


@dataclass(frozen=True)
class Piece:
    """A shard and its data: the slices' elements in order, row by row, in any shape and device."""

    shard: Shard
    data: torch.Tensor


@dataclass(frozen=True)
class Block:
    """One slice that this rank holds; `data` has any shape, and is flat once in host memory.

    Attributes:
        piece, patch: which piece it was cut from, and where it lies there; None: it is all of it.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    data: torch.Tensor
    piece: int
    patch: boxes.Patch | None

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's own, and the slice where that is not all of it."""
        if self.box == boxes.whole(self.global_shape):
            return self.name
        return boxes.label(self.name, self.box, self.global_shape)

    @property
    def offer(self) -> Offer:
        """The slice without its data."""
        return self.name, self.global_shape, self.dtype, self.box

    @property
    def shape(self) -> tuple[int, ...]:
        """The slice's own shape."""
        return boxes.extents(self.box)

    def with_data(self, data: torch.Tensor) -> Block:
        """The same slice with its elements at another place."""
        return replace(self, data=data)

    def found_in(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Its data in the pieces of a later save, which have the same shards in the same order."""
        data = pieces[self.piece].data
        return data if self.patch is None else seen(data.reshape(-1), self.patch)

    def memory(self) -> memoryview:
        """The bytes of the slice, not copied."""
        return self.data.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Agreement:
    """Who writes what, as all ranks agreed it.

    Attributes:
        share: what this rank writes.
        total_bytes, slices: what all ranks write together.
        aliases: tied names of all ranks.
        offers, tied: what this rank had offered: the agreement holds while every rank offers the
            same.
    """

    share: list[Key]
    total_bytes: int
    slices: int
    aliases: dict[str, str]
    offers: dict[Key, Offer]
    tied: dict[str, str]

    def disk_bytes(self, record: dict[str, Any]) -> int:
        """Room that all of it needs, manifest included. Errors: CheckpointError, as of `plain`."""
        return self.total_bytes + len(str(plain(record))) + SLICE_BYTES * (self.slices + 1)


@dataclass(frozen=True)
class Collected:
    """What this rank writes, in host memory, and what all ranks agreed."""

    blocks: list[Block]
    agreement: Agreement


def collect(pieces: Sequence[Piece], aliases: Mapping[str, str], world: World) -> Collected:
    """Agree who writes what, and bring this rank's share to host memory. Every rank calls it.

    Data already in host memory is not copied: it must not change until it is written.
    Errors: RankFailed on all ranks for a piece that contradicts its shard or another rank's.
    """
    held: dict[Key, Block] = {}

    def offer() -> dict[Key, Offer]:
        held.update(cut(pieces, aliases))
        return offers_of(held)

    agreement = agree(world, offer, aliases)
    blocks: list[Block] = []
    exchange(world, lambda: blocks.extend(_to_host(held[key]) for key in agreement.share))
    return Collected(blocks, agreement)


def cut(pieces: Sequence[Piece], aliases: Mapping[str, str]) -> dict[Key, Block]:
    """This rank's blocks, tied names left out; nothing is copied.

    Errors: CheckpointError for a piece that contradicts its shard, or a slice that comes twice.
    """
    held: dict[Key, Block] = {}
    for place, piece in enumerate(pieces):
        for block in _cut(piece, place) if piece.shard.name not in aliases else ():
            if (block.name, block.box) in held:
                raise CheckpointError(f"{block.key} is offered twice by one rank")
            held[block.name, block.box] = block
    return held


def offers_of(held: Mapping[Key, Block]) -> dict[Key, Offer]:
    """What a rank that holds these blocks offers."""
    return {key: block.offer for key, block in held.items()}


def agree(
    world: World, offer: Callable[[], Mapping[Key, Offer]], aliases: Mapping[str, str]
) -> Agreement:
    """Gather all ranks' offers and deal them; every rank calls it.

    Errors: RankFailed on all ranks if `offer` raised on any, or the offers do not fit together.
    """
    mine: dict[Key, Offer] = {}

    def tell() -> dict[str, Any]:
        mine.update(offer())
        return {"offers": list(mine.values()), "aliases": dict(aliases)}

    answers = exchange(world, tell)
    settled: list[Agreement] = []
    exchange(world, lambda: settled.append(_settle(answers, mine, dict(aliases), world.rank)))
    return settled[0]


def _settle(
    answers: Sequence[dict[str, Any]], mine: dict[Key, Offer], aliases: dict[str, str], rank: int
) -> Agreement:
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
    slices = sum(map(len, dealt.shares))
    return Agreement(dealt.shares[rank], dealt.total_bytes, slices, tied, mine, aliases)


def _from_json(fields: Sequence[Any]) -> Offer:
    name, shape, dtype, box = fields
    return name, tuple(shape), dtype, tuple((start, stop) for start, stop in box)


def _cut(piece: Piece, place: int) -> list[Block]:
    """The piece's slices; empty ones only for tensors that are empty themselves."""
    shard, data = piece.shard, piece.data.detach()
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
    kind = (shard.name, shard.global_shape, dtype)
    if len(shard.slices) == 1:
        held = data.numel() or 0 in shard.global_shape
        return [Block(*kind, shard.slices[0], data, place, None)] if held else []
    flat = data.reshape(-1)  # copies what is not contiguous
    return [
        Block(*kind, patch.box, seen(flat, patch), place, patch)
        for patch in boxes.patches(shard.slices)
        if boxes.elements(patch.box) or 0 in shard.global_shape
    ]


def seen(flat: torch.Tensor, patch: boxes.Patch) -> torch.Tensor:
    """A box of what lies in flat memory, not copied."""
    return flat.as_strided(patch.shape, patch.strides, flat.storage_offset() + patch.begin)


def _to_host(block: Block) -> Block:
    return block.with_data(block.data.cpu().contiguous().view(-1))
