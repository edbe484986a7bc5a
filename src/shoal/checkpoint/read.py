"""Loads a checkpoint on any layout: each rank reads only the slices that its own boxes meet.

    wanted box ∩ stored box ≠ ∅  →  read the stored slice, hash it on the way, copy the overlap

A slice is believed only if its hash, its file's header and size, and the manifest's digest agree.
Where wanted and stored box are the same, bytes go straight to their place; otherwise through a
buffer as large as one stored slice. `open_newest` takes the newest checkpoint that every rank can
read, and says of each newer one what is wrong with it.

Limits: a stored slice is read whole even if one row of it is wanted, since its hash covers all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import CheckpointError, ShoalError, nearest
from shoal.base.events import Emit
from shoal.base.shards import Box, Shard
from shoal.checkpoint import boxes, folders
from shoal.checkpoint.catalog import Found, find, read_manifest, step_folder, verify
from shoal.checkpoint.exchange import exchange, first_only
from shoal.checkpoint.faults import Damaged, RankFailed, shown
from shoal.checkpoint.manifest import Manifest, StoredSlice, StoredTensor
from shoal.checkpoint.pieces import seen
from shoal.checkpoint.storedfile import StoredReader
from shoal.fabric import World

__all__ = ["Found", "Loaded", "find", "load", "open_newest", "read_manifest", "verify"]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: where it lies, what it says of the run, and this rank's tensors."""

    path: Path
    step: int
    manifest: Manifest
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Target:
    """Where part of a stored slice goes: the box to fill, and the tensor that holds it."""

    box: Box
    data: torch.Tensor


Plan = dict[str, dict[tuple[str, StoredSlice], list[Target]]]
"""file → (tensor, stored slice) → every place that wants part of it."""


def load(path: Path, wanted: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """This rank's part of the checkpoint folder `path`, on the CPU, by name.

    wanted    any boxes of the stored tensors, under their own names or tied ones
    Gives     one slice: a tensor of the slice's shape; several: flat, slices in order
    Errors    Damaged when bytes are not those that were saved; CheckpointError when the checkpoint
              has no such tensor, or one of another shape or dtype
    """
    return load_from(path, read_manifest(path), wanted)


def load_from(path: Path, manifest: Manifest, wanted: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """As `load`, with the manifest already read and verified."""
    plan: Plan = {}
    result: dict[str, torch.Tensor] = {}
    for shard in wanted:
        result[shard.name] = _plan_shard(path, manifest, shard, plan)
    for file, slices in plan.items():
        with StoredReader(path / file, manifest.files[file]) as reader:
            for (name, piece), targets in slices.items():
                _fill(reader, name, manifest.tensors[name], piece, targets)
    return result


def open_newest(
    root: Path,
    wanted_from: Callable[[Manifest], Sequence[Shard]],
    world: World,
    emit: Emit,
    only: int | None = None,
) -> Loaded | None:
    """The newest checkpoint under `root` that all ranks can read; None if there never was one.

    only   the step whose checkpoint is wanted, and no other

    Rank 0 lists the candidates and tells the others (what exists may differ per rank on network
    file systems); each rank loads `wanted_from(manifest)`; then all vote. A damaged candidate is
    reported as `checkpoint_damaged` by rank 0, left as it is, and the next older one is tried.

    Errors: CheckpointError on all ranks when every candidate is damaged (starting over must be
    somebody's decision), or when the wanted shards are not those of the checkpoint (another model:
    an older file would not help). What `wanted_from` itself raises comes through where it rose.
    """
    try:
        return _open_newest(root, wanted_from, world, emit, only)
    except RankFailed as failure:
        if isinstance(failure.__cause__, ShoalError):
            raise failure.__cause__ from None
        raise


def _open_newest(
    root: Path,
    wanted_from: Callable[[Manifest], Sequence[Shard]],
    world: World,
    emit: Emit,
    only: int | None,
) -> Loaded | None:
    problems: list[str] = []
    for name in first_only(world, lambda: _candidates(root, only)):
        path, loaded = root / name, _Attempt(wanted_from)
        answers = exchange(world, partial(loaded.run, path))
        damage = [(rank, a["damage"]) for rank, a in enumerate(answers) if a["damage"]]
        if not damage:
            if len({answer["digest"] for answer in answers}) > 1:
                raise CheckpointError(
                    f"{shown(path)}: ranks read different manifests; the run folder must be on "
                    f"one file system that all machines share"
                )
            return loaded.result
        rank, fields = damage[0]
        tensor = f"{fields['tensor']} " if fields["tensor"] else ""
        problems.append(f"{fields['file']}: {tensor}{fields['reason']}")
        if world.is_first:
            emit("checkpoint_damaged", rank=rank, folder=str(path), **fields)
    if problems and only is not None:
        raise CheckpointError(
            f"{problems[0]}; nearest: move {shown(step_folder(root, only))} away, and go on from "
            f"the checkpoint before it"
        )
    if problems:
        raise CheckpointError(
            f"{shown(root)}: none of its {len(problems)} checkpoints can be read ({problems[0]}); "
            f"to start over, choose another folder with run.name=…"
        )
    return None


def _candidates(root: Path, only: int | None) -> list[str]:
    folders.remove_leftovers(root)
    return [found.path.name for found in find(root) if only in (None, found.step)]


class _Attempt:
    """One rank's try at one candidate: the result stays here, the verdict travels as JSON."""

    def __init__(self, wanted_from: Callable[[Manifest], Sequence[Shard]]) -> None:
        self.wanted_from = wanted_from
        self.result: Loaded | None = None

    def run(self, path: Path) -> dict[str, Any]:
        try:
            manifest = read_manifest(path)
            tensors = load_from(path, manifest, self.wanted_from(manifest))
        except Damaged as problem:
            return {"damage": problem.fields(), "digest": ""}
        self.result = Loaded(path, manifest.step, manifest, tensors)
        return {"damage": None, "digest": manifest.digest}


def _plan_shard(path: Path, manifest: Manifest, shard: Shard, plan: Plan) -> torch.Tensor:
    """Note in `plan` which stored slices fill this shard; gives its tensor, still empty."""
    name = manifest.aliases.get(shard.name, shard.name)
    tensor = manifest.tensors.get(name)
    if tensor is None:
        close = nearest(shard.name, manifest.tensors)
        hint = f"; nearest: {close}" if close else ""
        raise CheckpointError(f"{shown(path)}: holds no tensor {shard.name}{hint}")
    if (tensor.shape, tensor.dtype) != (shard.global_shape, shard.dtype):
        raise CheckpointError(
            f"{shown(path)}: {shard.name} is {tensor.dtype} {list(tensor.shape)} there, "
            f"{shard.dtype} {list(shard.global_shape)} here: another model or precision wrote it"
        )
    for box in shard.slices:
        if not boxes.fits(box, shard.global_shape):
            raise CheckpointError(
                f"{shard.name}: slice {list(box)} lies outside shape {list(shard.global_shape)}"
            )
    flat = torch.empty(shard.elements, dtype=getattr(torch, shard.dtype))
    for patch in boxes.patches(shard.slices):
        box, part = patch.box, seen(flat, patch)
        for piece in tensor.slices:
            if boxes.overlap(piece.box, box) is not None:
                slices = plan.setdefault(piece.file, {})
                slices.setdefault((name, piece), []).append(Target(box, part))
    return flat.view(boxes.extents(shard.slices[0])) if len(shard.slices) == 1 else flat


def _fill(
    reader: StoredReader,
    name: str,
    tensor: StoredTensor,
    piece: StoredSlice,
    targets: Sequence[Target],
) -> None:
    direct = len(targets) == 1 and targets[0].box == piece.box and targets[0].data.is_contiguous()
    count = boxes.elements(piece.box)
    room = targets[0].data if direct else torch.empty(count, dtype=getattr(torch, tensor.dtype))
    flat = room.view(-1).view(torch.uint8)
    reader.read(name, tensor.shape, tensor.dtype, piece, flat.numpy().data)
    if direct:
        return
    source = room.view(boxes.extents(piece.box))
    for target in targets:
        shared = boxes.overlap(piece.box, target.box)
        if shared is not None:
            part = source[boxes.inside(shared, piece.box)]
            target.data[boxes.inside(shared, target.box)] = part
