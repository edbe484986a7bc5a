"""Blocks of each rank, the agreement on the blocks that each rank writes, and its own share.

A piece is a shard with its data; a block is one slice of one piece. All ranks gather all offers
(names and boxes, no data) and compute the same deal from them. The offers hardly ever change
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
"""Bytes of one slice in header and manifest, generous: the space check refuses early, not late."""

Key = tuple[str, Box]
"""Key of a block: its tensor's name and its slice."""


@dataclass(frozen=True)
class Piece:
    """A shard and its data: the slices' elements in order, row by row, in any shape and device."""

    shard: Shard
    data: torch.Tensor


@dataclass(frozen=True)
class Block:
    """One slice that this rank holds; `data` has any shape, and is flat once in host memory.

    Attributes:
        piece, patch: the piece that it was cut from, and its strides there; None: all of the piece.
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
        """Name in the file: the tensor's own, and the slice unless it is the whole tensor."""
        if self.box == boxes.whole(self.global_shape):
            return self.name
        return boxes.label(self.name, self.box, self.global_shape)

    @property
    def offer(self) -> Offer:
        """Offer of the slice: its name, shape, dtype and box, without the data."""
        return self.name, self.global_shape, self.dtype, self.box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return boxes.extents(self.box)

    def with_data(self, data: torch.Tensor) -> Block:
        """Return the same slice with its elements in `data`."""
        return replace(self, data=data)

    def found_in(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the slice's data in a later save's pieces, whose shards are the same in order."""
        data = pieces[self.piece].data
        return data if self.patch is None else seen(data.reshape(-1), self.patch)

    def memory(self) -> memoryview:
        """Return the bytes of the slice, not copied."""
        return self.data.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Agreement:
    """Agreement of all ranks on the rank that writes each slice.

    Attributes:
        share: slices that this rank writes.
        total_bytes, slices: of all ranks together.
        aliases: tied names of all ranks.
        offers, tied: this rank's own: the agreement holds while every rank offers the same.
    """

    share: list[Key]
    total_bytes: int
    slices: int
    aliases: dict[str, str]
    offers: dict[Key, Offer]
    tied: dict[str, str]

    def disk_bytes(self, record: dict[str, Any]) -> int:
        """Return the bytes that the checkpoint needs on disk, the manifest included.

        Raises:
            CheckpointError: as `plain`.
        """
        return self.total_bytes + len(str(plain(record))) + SLICE_BYTES * (self.slices + 1)


@dataclass(frozen=True)
class Collected:
    """Blocks that this rank writes, in host memory, and the agreement of all ranks."""

    blocks: list[Block]
    agreement: Agreement


def collect(pieces: Sequence[Piece], aliases: Mapping[str, str], world: World) -> Collected:
    """Agree on the writer of each slice, and copy this rank's share to host memory (collective).

    Data already in host memory is not copied: it must not change until it is written.

    Raises:
        RankFailed: on all ranks, for a piece that contradicts its shard or another rank's.
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
    """Cut this rank's pieces into blocks, tied names left out; nothing is copied.

    Raises:
        CheckpointError: a piece contradicts its shard, or a slice comes twice.
    """
    held: dict[Key, Block] = {}
    for place, piece in enumerate(pieces):
        for block in _cut(piece, place) if piece.shard.name not in aliases else ():
            if (block.name, block.box) in held:
                raise CheckpointError(f"{block.key} is offered twice by one rank")
            held[block.name, block.box] = block
    return held


def offers_of(held: Mapping[Key, Block]) -> dict[Key, Offer]:
    """Return the offers of a rank that holds these blocks."""
    return {key: block.offer for key, block in held.items()}


def agree(
    world: World, offer: Callable[[], Mapping[Key, Offer]], aliases: Mapping[str, str]
) -> Agreement:
    """Gather all ranks' offers and assign their slices to writers; every rank calls it.

    Raises:
        RankFailed: on all ranks if `offer` raised on any, or the offers do not fit together.
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
    """Cut a piece into its slices; empty ones only for tensors that are empty themselves."""
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
    """Return a strided view of a box in flat memory."""
    return flat.as_strided(patch.shape, patch.strides, flat.storage_offset() + patch.begin)


def _to_host(block: Block) -> Block:
    return block.with_data(block.data.cpu().contiguous().view(-1))
