"""Load a checkpoint on any layout: each rank reads only the slices that overlap its own boxes.

    wanted box ∩ stored box ≠ ∅  →  read the stored slice, hash it on the way, copy the overlap

A slice is accepted only if its hash, its file's header and size, and the manifest's digest agree.
Where wanted and stored box are the same, bytes go straight to their destination; otherwise through
a buffer as large as one stored slice. `open_newest` takes the newest checkpoint that every rank can
read, and reports the fault of each newer one. A slice that all ranks want is read by one rank and
broadcast (`shared_read`).

Limits: a stored slice is read whole even if one row of it is wanted, since its hash covers all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import CheckpointError, ShoalError, nearest_word
from shoal.base.plans.tensor_shards import Shard
from shoal.base.runlog.events import Emit
from shoal.checkpoint.agreement.collective_phase import gather_results, run_on_first_rank
from shoal.checkpoint.agreement.rank_pieces import view_patch
from shoal.checkpoint.format import boxes, folders
from shoal.checkpoint.format.checkpoint_faults import (
    DamagedFileError,
    DamagedStepError,
    RankFailed,
    short_path,
)
from shoal.checkpoint.format.listing import (
    list_checkpoints,
    read_manifest,
    step_folder,
)
from shoal.checkpoint.format.manifest import Manifest, StoredSlice, StoredTensor
from shoal.checkpoint.format.stored_shard import StoredShardReader
from shoal.checkpoint.load import shared_read
from shoal.checkpoint.load.shared_read import Key, ReadTarget, copy_to_targets
from shoal.fabric import World
from shoal.wire.phases import phase


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint: its path, its manifest, and this rank's tensors."""

    path: Path
    step: int
    manifest: Manifest
    tensors: dict[str, torch.Tensor]


Plan = dict[Key, list[ReadTarget]]
"""Stored slice → every target of a part of it."""


def load(path: Path, wanted: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Load this rank's part of the checkpoint folder `path` to the CPU, by name.

    Args:
        wanted: any boxes of the stored tensors, under their own names or tied ones.

    Returns:
        One slice: a tensor of the slice's shape; several: flat, slices in order.

    Raises:
        Damaged: bytes differ from those that were saved.
        CheckpointError: the checkpoint has no such tensor, or one of another shape or dtype.
    """
    return load_from(path, read_manifest(path), wanted)


def load_from(path: Path, manifest: Manifest, wanted: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Load as `load`, with the manifest already read and verified."""
    plan: Plan = {}
    result = {shard.name: _plan_shard(path, manifest, shard, plan) for shard in wanted}
    _read(path, manifest, plan)
    return result


def _read(path: Path, manifest: Manifest, plan: Plan) -> None:
    """Fill every target of the plan, file by file."""
    files: dict[str, list[Key]] = {}
    for key in plan:
        files.setdefault(key[1].file, []).append(key)
    with phase("read", of=len(plan)) as told:
        for file, keys in files.items():
            with closing(StoredShardReader(path / file, manifest.files[file])) as reader:
                for name, piece in keys:
                    _fill_targets(reader, name, manifest.tensors[name], piece, plan[name, piece])
                    told.step()


def open_newest(
    root: Path,
    wanted_from: Callable[[Manifest], Sequence[Shard]],
    world: World,
    emit: Emit,
    only: int | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint under `root` that all ranks can read; every rank calls it.

    Rank 0 deletes the temporary folders of dead saves, lists the candidates and broadcasts the list
    (network file systems may show each rank another one). Each rank announces its wanted slices and
    reads its share; then all vote, and broadcast the slices that all want. If a candidate is
    damaged, rank 0 reports it as `checkpoint_damaged` and leaves it as it is, and the next older
    one is tried.

    Args:
        wanted_from: returns the shards that this rank wants of a manifest.
        only: the step of the one checkpoint to load; None: any.

    Returns:
        This rank's tensors; None if there is no checkpoint, or none of step `only`.

    Raises:
        CheckpointError: on all ranks: every candidate is damaged (a user must decide to start
            over), ranks read different manifests, one is of another Shoal's format version, or the
            wanted shards are not those of the checkpoint (another model: an older file would not
            help).
        DamagedStepError: the checkpoint of step `only` is damaged.
        ShoalError: `wanted_from` raised it on this rank; on the others, and for any other
            exception, a CheckpointError that names the rank.
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
) -> LoadedCheckpoint | None:
    problems: list[str] = []
    for name in run_on_first_rank(world, lambda: _list_candidates(root, only)):
        path = root / name
        attempt = _LoadAttempt(path, wanted_from)
        answers = gather_results(world, partial(attempt.run, attempt.read_manifest))
        damage = _collect_damage(answers)
        if not damage:
            if len({answer["digest"] for answer in answers}) > 1:
                raise CheckpointError(
                    f"{short_path(path)}: ranks read different manifests; the run folder must "
                    "be on "
                    f"one file system that all machines share"
                )
            readers = shared_read.assign_readers(
                attempt.manifest, [answer["wanted"] for answer in answers]
            )
            read = partial(attempt.read, world.rank, readers)
            damage = _collect_damage(gather_results(world, partial(attempt.run, read)))
        if not damage:
            shared_read.broadcast_slices(world, readers, attempt.plan)
            return LoadedCheckpoint(path, attempt.manifest.step, attempt.manifest, attempt.tensors)
        rank, fields = damage[0]
        tensor = f"{fields['tensor']} " if fields["tensor"] else ""
        problems.append(f"{fields['file']}: {tensor}{fields['reason']}")
        if world.is_first:
            emit("checkpoint_damaged", rank=rank, folder=str(path), **fields)
    if problems and only is not None:
        raise DamagedStepError(
            f"{problems[0]}; try: move {short_path(step_folder(root, only))} away, and go on from "
            f"the checkpoint before it"
        )
    if problems:
        raise CheckpointError(
            f"{short_path(root)}: none of its {len(problems)} checkpoints can be read "
            f"({problems[0]}); "
            f"to start over, choose another folder with run.name=…"
        )
    return None


def _list_candidates(root: Path, only: int | None) -> list[str]:
    folders.remove_leftovers(root)
    return [found.path.name for found in list_checkpoints(root) if only in (None, found.step)]


def _collect_damage(answers: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, str]]]:
    return [(rank, answer["damage"]) for rank, answer in enumerate(answers) if answer["damage"]]


class _LoadAttempt:
    """One rank's attempt to load one candidate; tensors stay here, answers to ranks are JSON."""

    manifest: Manifest

    def __init__(self, path: Path, wanted_from: Callable[[Manifest], Sequence[Shard]]) -> None:
        self.path = path
        self.wanted_from = wanted_from
        self.plan: Plan = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def run(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of one phase, or the damage that it met."""
        try:
            return {"damage": None, **work()}
        except DamagedFileError as problem:
            return {"damage": problem.fields()}

    def read_manifest(self) -> dict[str, Any]:
        """Read the manifest; return its digest, and the slices that this rank wants whole."""
        self.manifest = read_manifest(self.path)
        for shard in self.wanted_from(self.manifest):
            self.tensors[shard.name] = _plan_shard(self.path, self.manifest, shard, self.plan)
        wanted = shared_read.find_whole_slices(self.manifest, self.plan)
        return {"digest": self.manifest.digest, "wanted": wanted}

    def read(self, rank: int, readers: Mapping[Key, int]) -> dict[str, Any]:
        """Read this rank's share of the common slices, and the slices that it alone wants."""
        own = {k: places for k, places in self.plan.items() if readers.get(k, rank) == rank}
        _read(self.path, self.manifest, own)
        return {}


def _plan_shard(path: Path, manifest: Manifest, shard: Shard, plan: Plan) -> torch.Tensor:
    """Add the stored slices that fill this shard to `plan`; return its tensor, still empty."""
    name = manifest.aliases.get(shard.name, shard.name)
    tensor = manifest.tensors.get(name)
    if tensor is None:
        close = nearest_word(shard.name, manifest.tensors)
        hint = f"; try: {close}" if close else ""
        raise CheckpointError(f"{short_path(path)}: holds no tensor {shard.name}{hint}")
    if (tensor.shape, tensor.dtype) != (shard.global_shape, shard.dtype):
        raise CheckpointError(
            f"{short_path(path)}: {shard.name} is {tensor.dtype} {list(tensor.shape)} there, "
            f"{shard.dtype} {list(shard.global_shape)} here: another model or precision wrote it"
        )
    for box in shard.slices:
        if not boxes.fits(box, shard.global_shape):
            raise CheckpointError(
                f"{shard.name}: slice {list(box)} lies outside shape {list(shard.global_shape)}"
            )
    flat = torch.empty(shard.elements, dtype=getattr(torch, shard.dtype))
    for patch in boxes.merge_boxes(shard.slices):
        box, part = patch.box, view_patch(flat, patch)
        for piece in tensor.slices:
            if boxes.overlap(piece.box, box) is not None:
                plan.setdefault((name, piece), []).append(ReadTarget(box, part))
    return flat.view(boxes.extents(shard.slices[0])) if len(shard.slices) == 1 else flat


def _fill_targets(
    reader: StoredShardReader,
    name: str,
    tensor: StoredTensor,
    piece: StoredSlice,
    targets: Sequence[ReadTarget],
) -> None:
    direct = len(targets) == 1 and targets[0].box == piece.box and targets[0].data.is_contiguous()
    count = boxes.elements(piece.box)
    room = targets[0].data if direct else torch.empty(count, dtype=getattr(torch, tensor.dtype))
    flat = room.view(-1).view(torch.uint8)
    reader.read(name, tensor.shape, tensor.dtype, piece, flat.numpy().data)
    if direct:
        return
    copy_to_targets(room, piece, targets)
