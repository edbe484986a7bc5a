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
from shoal.checkpoint.agreement.assign_slices import Offer, assign_writers
from shoal.checkpoint.agreement.collective_phase import gather_results
from shoal.checkpoint.format import boxes
from shoal.checkpoint.format.manifest import to_plain_json
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
class HeldSlice:
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
        return boxes.format_slice(self.name, self.box, self.global_shape)

    @property
    def offer(self) -> Offer:
        """Offer of the slice: its name, shape, dtype and box, without the data."""
        return self.name, self.global_shape, self.dtype, self.box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return boxes.extents(self.box)

    def with_data(self, data: torch.Tensor) -> HeldSlice:
        """Return the same slice with its elements in `data`."""
        return replace(self, data=data)

    def find_data(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the slice's data in a later save's pieces, whose shards are the same in order."""
        data = pieces[self.piece].data
        return data if self.patch is None else view_patch(data.reshape(-1), self.patch)

    def memory(self) -> memoryview:
        """Return the bytes of the slice, not copied."""
        return self.data.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class WriteAgreement:
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
            CheckpointError: as `to_plain_json`.
        """
        return self.total_bytes + len(str(to_plain_json(record))) + SLICE_BYTES * (self.slices + 1)


@dataclass(frozen=True)
class CheckpointShare:
    """Blocks that this rank writes, in host memory, and the agreement of all ranks."""

    blocks: list[HeldSlice]
    agreement: WriteAgreement


def agree_on_pieces(
    pieces: Sequence[Piece], aliases: Mapping[str, str], world: World
) -> tuple[dict[Key, HeldSlice], WriteAgreement]:
    """Return the slices of this rank's pieces, and the agreement of all ranks on their writers.

    Raises:
        RankFailed: on all ranks, for a piece that contradicts its shard or another rank's.
    """
    held: dict[Key, HeldSlice] = {}

    def offer() -> dict[Key, Offer]:
        held.update(split_pieces(pieces, aliases))
        return make_offers(held)

    return held, agree_on_writers(world, offer, aliases)


def collect_share(
    pieces: Sequence[Piece], aliases: Mapping[str, str], world: World
) -> CheckpointShare:
    """Assign each slice to a writer rank, and copy the slices of this rank to host memory.

    Every rank calls it. Data already in host memory is not copied: it must not change until it is
    written.

    Args:
        pieces: the shards that this rank holds, with their data.
        aliases: tied name → name under which its tensor is stored.

    Returns:
        the slices that this rank must write, and the agreement of all ranks.

    Raises:
        RankFailed: on all ranks, for a piece that contradicts its shard or another rank's.
    """
    held, agreement = agree_on_pieces(pieces, aliases, world)
    blocks: list[HeldSlice] = []
    gather_results(world, lambda: blocks.extend(_to_host(held[key]) for key in agreement.share))
    return CheckpointShare(blocks, agreement)


def split_pieces(pieces: Sequence[Piece], aliases: Mapping[str, str]) -> dict[Key, HeldSlice]:
    """Cut this rank's pieces into blocks, tied names left out; nothing is copied.

    Raises:
        CheckpointError: a piece contradicts its shard, or a slice comes twice.
    """
    held: dict[Key, HeldSlice] = {}
    for place, piece in enumerate(pieces):
        for block in _split_piece(piece, place) if piece.shard.name not in aliases else ():
            if (block.name, block.box) in held:
                raise CheckpointError(f"{block.key} is offered twice by one rank")
            held[block.name, block.box] = block
    return held


def make_offers(held: Mapping[Key, HeldSlice]) -> dict[Key, Offer]:
    """Return the offers of a rank that holds these blocks."""
    return {key: block.offer for key, block in held.items()}


def agree_on_writers(
    world: World, offer: Callable[[], Mapping[Key, Offer]], aliases: Mapping[str, str]
) -> WriteAgreement:
    """Gather all ranks' offers and assign their slices to writers; every rank calls it.

    Raises:
        RankFailed: on all ranks if `offer` raised on any, or the offers do not fit together.
    """
    mine: dict[Key, Offer] = {}

    def collect_offers() -> dict[str, Any]:
        mine.update(offer())
        return {"offers": list(mine.values()), "aliases": dict(aliases)}

    answers = gather_results(world, collect_offers)
    settled: list[WriteAgreement] = []
    gather_results(
        world, lambda: settled.append(_build_agreement(answers, mine, dict(aliases), world.rank))
    )
    return settled[0]


def _build_agreement(
    answers: Sequence[dict[str, Any]], mine: dict[Key, Offer], aliases: dict[str, str], rank: int
) -> WriteAgreement:
    dealt = assign_writers(
        [[_from_json(fields) for fields in answer["offers"]] for answer in answers]
    )
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
    return WriteAgreement(dealt.shares[rank], dealt.total_bytes, slices, tied, mine, aliases)


def _from_json(fields: Sequence[Any]) -> Offer:
    name, shape, dtype, box = fields
    return name, tuple(shape), dtype, tuple((start, stop) for start, stop in box)


def _split_piece(piece: Piece, place: int) -> list[HeldSlice]:
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
        return [HeldSlice(*kind, shard.slices[0], data, place, None)] if held else []
    flat = data.reshape(-1)  # copies what is not contiguous
    return [
        HeldSlice(*kind, patch.box, view_patch(flat, patch), place, patch)
        for patch in boxes.merge_boxes(shard.slices)
        if boxes.elements(patch.box) or 0 in shard.global_shape
    ]


def view_patch(flat: torch.Tensor, patch: boxes.Patch) -> torch.Tensor:
    """Return a strided view of a box in flat memory."""
    return flat.as_strided(patch.shape, patch.strides, flat.storage_offset() + patch.begin)


def _to_host(block: HeldSlice) -> HeldSlice:
    return block.with_data(block.data.cpu().contiguous().view(-1))
