"""Share the reading of slices that all ranks want: one rank reads, hashes and broadcasts each.

    1. every rank announces the stored slices that it wants whole
    2. each slice that all want goes, largest first, to the rank with the fewest bytes to read
    3. all read and hash their share; when nobody found damage, every slice is broadcast in turn

So replicas (ddp, and the weights under zero) read each byte once, not once per rank. Small slices
are read by every rank: a message would cost more. Every rank computes the same assignment from the
same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.base.plans.tensor_shards import DTYPES, Box
from shoal.checkpoint.format import boxes
from shoal.checkpoint.format.manifest import Manifest, StoredSlice
from shoal.fabric import World
from shoal.wire.phases import iter_with_progress

LEAST_BYTES = 2**16

Key = tuple[str, StoredSlice]
"""A stored slice: the tensor's name, and its file, key and box."""


@dataclass(frozen=True)
class ReadTarget:
    """Destination of part of a stored slice: the box to fill, and the tensor that holds it."""

    box: Box
    data: torch.Tensor


def list_slice_keys(manifest: Manifest) -> list[Key]:
    """List every stored slice, in an order that all readers of the manifest share."""
    return [
        (name, piece)
        for name in sorted(manifest.tensors)
        for piece in manifest.tensors[name].slices
    ]


def find_whole_slices(manifest: Manifest, targets: Mapping[Key, Sequence[ReadTarget]]) -> list[int]:
    """Return the indices in `list_slice_keys` of the slices that this rank wants whole."""
    return [
        number
        for number, key in enumerate(list_slice_keys(manifest))
        if _slice_bytes(manifest, key) >= LEAST_BYTES
        and _find_whole_target(key, targets.get(key, ())) is not None
    ]


def assign_readers(manifest: Manifest, wanted: Sequence[Sequence[int]]) -> dict[Key, int]:
    """Assign each slice that all ranks want whole to one reader, in the order of `list_slice_keys`.

    Args:
        wanted: of every rank, the result of `find_whole_slices`.
    """
    if len(wanted) == 1:
        return {}
    keys, common = list_slice_keys(manifest), sorted(set(wanted[0]).intersection(*wanted[1:]))
    loads, readers = [0] * len(wanted), dict.fromkeys(common, 0)
    for number in sorted(common, key=lambda n: (-_slice_bytes(manifest, keys[n]), n)):
        readers[number] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[readers[number]] += _slice_bytes(manifest, keys[number])
    return {keys[number]: readers[number] for number in common}


def broadcast_slices(
    world: World, readers: Mapping[Key, int], targets: Mapping[Key, Sequence[ReadTarget]]
) -> None:
    """Broadcast every shared slice from the rank that read it; every rank calls at once."""
    for key, reader in iter_with_progress("share", len(readers), readers.items()):
        piece = key[1]
        holder = _find_whole_target(key, targets[key]) or targets[key][0]
        direct = holder.box == piece.box and holder.data.is_contiguous()
        own = holder.data if direct else holder.data[boxes.index_within(piece.box, holder.box)]
        if world.rank == reader or direct:
            whole = own.contiguous()
        else:
            whole = torch.empty(own.shape, dtype=own.dtype)
        raw = whole.view(-1).view(torch.uint8)
        travelling = raw.to(world.device)
        world.broadcast(travelling, reader)
        if world.rank == reader:
            continue
        if travelling is not raw:
            raw.copy_(travelling)
        copy_to_targets(whole, piece, [t for t in targets[key] if not (direct and t is holder)])


def copy_to_targets(whole: torch.Tensor, piece: StoredSlice, targets: Sequence[ReadTarget]) -> None:
    """Copy each target's part of a slice's data."""
    source = whole.view(boxes.extents(piece.box))
    for target in targets:
        shared = boxes.overlap(piece.box, target.box)
        if shared is not None:
            part = source[boxes.index_within(shared, piece.box)]
            target.data[boxes.index_within(shared, target.box)] = part


def _find_whole_target(key: Key, targets: Sequence[ReadTarget]) -> ReadTarget | None:
    """Return a target that holds the slice whole."""
    box = key[1].box
    return next((target for target in targets if boxes.overlap(box, target.box) == box), None)


def _slice_bytes(manifest: Manifest, key: Key) -> int:
    name, piece = key
    return boxes.elements(piece.box) * DTYPES[manifest.tensors[name].dtype][1]
