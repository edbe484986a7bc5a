"""Checkpoints of a run whose nodes share no disk: each node has every one complete on its own.

    keeper    of a disk: the first rank that sees it; it makes and renames folders there
    save      ranks write their files on their own disk, keepers send each other the missing files,
              received files are hashed, and only then every keeper renames its copy to `step-N`
    restore   the newest of all disks, by step and digest, is verified on its disk; keepers that
              lack it get it from those that have it complete; then every rank reads its own disk

So a node that is left alone goes on from its own disk, and a new node, or one that was away, gets
the missing files from its peers. No received file is used before its hashes were compared. A
damaged checkpoint is replaced and moved to `*.damaged`; if no disk has a complete copy of a step,
the step before it counts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.runlog.events import Emit
from shoal.checkpoint.agreement.collective_phase import gather_results, run_on_first_rank
from shoal.checkpoint.agreement.rank_pieces import CheckpointShare
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, RankFailed, short_path
from shoal.checkpoint.format.listing import (
    check_shard_file,
    list_checkpoints,
    read_manifest,
    slices_by_file,
    step_folder,
)
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, decode, encode
from shoal.checkpoint.save.file_transfer import FileTransfer, transfer_files
from shoal.checkpoint.save.shard_writer import join_parts, write_shard
from shoal.fabric import World

Keepers = tuple[int, ...]
"""By rank, the first that sees the same disk; () where all see one."""

_known: dict[Path, Keepers] = {}


def find_keepers(folder: Path, world: World) -> Keepers:
    """Find the ranks that share each disk at `folder`; every rank calls it.

    Raises:
        ConfigError: the same on all ranks: ranks of one machine see several disks.
        RankFailed: the folder cannot be made.
    """
    word = world.broadcast_json(secrets.token_hex(8) if world.is_first else None)
    names = [folder / f".probe-{word}-{rank}" for rank in range(world.size)]

    def show() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names[world.rank].touch()

    def first_ranks() -> list[int]:
        first = next(rank for rank, name in enumerate(names) if name.exists())
        return [first, world.rank - world.local_rank]

    try:
        gather_results(world, show)
        seen = gather_results(world, first_ranks)
    finally:
        names[world.rank].unlink(missing_ok=True)
    keepers = tuple(first for first, _ in seen)
    for rank, (first, chief) in enumerate(seen):
        other = chief if keepers[chief] != first else first
        if keepers[other] != first:
            raise ConfigError(
                f"run.folder = {folder}: rank {rank} of {world.size} does not see what rank "
                f"{other}, on the same machine, writes there; try: a folder that all ranks of "
                f"a machine see, best all machines"
            )
    _known[folder.absolute()] = keepers = keepers if any(keepers) else ()
    return keepers


def find_folder_keepers(root: Path, world: World) -> Keepers:
    """Return the keepers of another folder than the run's; every rank calls it."""
    root = root.absolute()
    for folder in (root, *root.parents):
        if folder in _known:
            return _known[folder]
    return find_keepers(root, world)


def save_on_each_disk(
    final: Path,
    step: int,
    record: dict[str, Any],
    keep: int,
    keepers: Keepers,
    collecting: Callable[[], CheckpointShare],
    world: World,
    emit: Emit,
) -> tuple[int, bool]:
    """Save as `save_collected`, where `final` is on several disks; keepers emit its events.

    Returns:
        Bytes of all shard files, and whether all disks had them before.
    """
    began_s, root = time.perf_counter(), final.parent
    keeper, made = keepers[world.rank], list[Path]()
    try:
        collected = collecting()
        if existing := _find_existing(final, keepers, world, emit):
            return existing.size_bytes, True
        agreed = collected.agreement

        def make_folder() -> str:
            if keeper == world.rank:
                made.append(folders.make_step_folder(final, agreed.disk_bytes(record)))
            return made[0].name if made else ""

        folder = root / gather_results(world, make_folder)[keeper]
        parts = gather_results(world, lambda: write_shard(folder, world.rank, collected.blocks))
        text = run_on_first_rank(
            world, lambda: encode(join_parts(step, parts, agreed.aliases, record)).decode()
        )
        manifest = decode(text.encode(), folder / FILE_NAME)
        owners = {part["file"]: keepers[rank] for rank, part in enumerate(parts) if part}
        parcels = _plan_transfers(
            manifest, {name: [one] for name, one in owners.items()}, set(keepers)
        )
        transfer_files(world, parcels, lambda one: folder / one.name, lambda one: folder / one.name)
        come = [name for name, owner in owners.items() if owner != keeper]
        gather_results(world, lambda: _verify_files(folder, manifest, come, keepers, world))
        gather_results(world, lambda: folders.commit(folder, final, manifest) if made else 0)
    except RankFailed as failure:
        for half in made:
            shutil.rmtree(half, ignore_errors=True)
        if keeper == world.rank:
            emit("checkpoint_failed", step=step, rank=failure.rank, reason=failure.reason)
        world.barrier()
        raise CheckpointError(
            f"{short_path(final)} was not saved: {failure}; older checkpoints are as they were"
        ) from failure
    save_s = time.perf_counter() - began_s
    if keeper == world.rank:
        size_bytes = manifest.size_bytes
        emit("checkpoint_saved", step=step, folder=str(final), bytes=size_bytes, seconds=save_s)
        try:
            folders.delete_old_steps(root, step, keep)
        except OSError as failure:
            text = f"{short_path(root)}: old checkpoints stay: {failure.strerror}"
            emit("notice", step=step, text=text)
    return manifest.size_bytes, False


@dataclass(frozen=True)
class SyncedCheckpoint:
    """The checkpoint that all disks have now.

    Attributes:
        source: a keeper that had it.
        lacked: keepers that did not → the newest step before it that they have; 0 none.
    """

    step: int
    source: int
    lacked: dict[int, int]


def sync_newest(
    root: Path,
    keepers: Keepers,
    world: World,
    emit: Emit,
    only: int | None = None,
    *,
    verify: bool = True,
) -> SyncedCheckpoint | None:
    """Copy the newest checkpoint of all disks to each of them, verified; every rank calls it.

    Args:
        emit: keepers emit `checkpoint_damaged` for a checkpoint that does not verify.
        only: the one step to copy; None: any.
        verify: False: files that all disks have are not read here; the caller verifies them.

    Returns:
        None if no disk has any.

    Raises:
        CheckpointError: the same on all ranks: all checkpoints are damaged, or a disk refuses the
            copy, for example a full one.
    """
    told = gather_results(
        world, partial(_list_own_checkpoints, root, only, emit, keeps=world.rank in keepers)
    )
    held = [dict[str, str](one) for one, _ in told]  # equal messages are one object
    problems = [problem for _, found in told for problem in found]
    while found := _choose_newest(held):
        step, digest, having = found
        if set(having) == set(keepers) and not verify:
            return SyncedCheckpoint(step, having[0], {})
        final = step_folder(root, step)
        damage = _find_damage(final, having, keepers, world)
        for keeper, fields in damage.items():
            problems.append(f"{fields['file']}: {fields['tensor']} {fields['reason']}")
            del held[keeper][str(step)]
            if keeper == world.rank:
                emit("checkpoint_damaged", folder=str(final), **fields)
        whole = [one for one in having if one not in damage]
        if whole:
            lacking = [one for one in sorted(set(keepers)) if one not in whole]
            before = [max((int(n) for n in one if int(n) < step), default=0) for one in held]
            word = "other" if str(step) in held[world.rank] else "damaged"
            if lacking:
                _fetch(final, digest, whole, lacking, word, keepers, world)
            return SyncedCheckpoint(step, whole[0], {one: before[one] for one in lacking})
    if problems:
        raise CheckpointError(
            f"{short_path(root)}: no node has a checkpoint that can be read ({problems[0]}); to "
            "start "
            f"over, choose another folder with run.name=…"
        )
    return None


def _fetch(
    final: Path,
    digest: str,
    whole: Sequence[int],
    lacked: Sequence[int],
    word: str,
    keepers: Keepers,
    world: World,
) -> None:
    """Copy one checkpoint from keepers that have it complete to those that lack it.

    Args:
        word: this keeper's folder of the same name is renamed to `.damaged` or `.other`.
    """
    root, keeper, made = final.parent, keepers[world.rank], list[Path]()
    try:
        told = gather_results(
            world,
            lambda: (
                (final / FILE_NAME).read_text(encoding="utf-8") if world.rank == whole[0] else ""
            ),
        )
        data = told[whole[0]].encode()
        manifest = decode(data, final / FILE_NAME)
        if manifest.digest != digest:
            raise CheckpointError(
                f"{short_path(final)}: changed on rank {whole[0]} while it was read"
            )

        def make_folder() -> str:
            if world.rank in lacked:
                made.append(folders.make_step_folder(final, manifest.size_bytes + len(data)))
            return made[0].name if made else ""

        folder = root / (gather_results(world, make_folder)[keeper] or final.name)
        sources = {name: list(whole) for name in manifest.files}
        parcels = _plan_transfers(manifest, sources, {*whole, *lacked})
        transfer_files(world, parcels, lambda one: final / one.name, lambda one: folder / one.name)
        come = list(manifest.files) if keeper in lacked else []
        gather_results(world, lambda: _verify_files(folder, manifest, come, keepers, world))

        def end() -> None:
            if made:
                if os.path.lexists(final):
                    folders.quarantine(final, word)
                folders.commit(folder, final, manifest)

        gather_results(world, end)
    except RankFailed as failure:
        for half in made:
            shutil.rmtree(half, ignore_errors=True)
        raise CheckpointError(
            f"{short_path(final)} was not brought from a peer: {failure}"
        ) from failure


def _find_existing(final: Path, keepers: Keepers, world: World, emit: Emit) -> Manifest | None:
    """Return the manifest if all disks have this step, equal and complete; else move it aside."""

    def read_digest() -> str:
        try:
            return read_manifest(final).digest if os.path.lexists(final) else ""
        except DamagedFileError:
            return "damaged"

    digests = gather_results(world, read_digest)
    if not any(digests):
        return None
    having = [one for one in sorted(set(keepers)) if digests[one]]
    damage = _find_damage(final, having, keepers, world)
    if not damage and len(set(digests)) == 1:
        return read_manifest(final)

    def put_aside() -> None:
        if world.rank in having:
            fields = damage.get(world.rank)
            kept_as = folders.quarantine(final, "damaged" if fields else "other")
            if fields:
                emit("checkpoint_damaged", folder=str(final), kept_as=str(kept_as), **fields)

    gather_results(world, put_aside)
    return None


def _list_own_checkpoints(root: Path, only: int | None, emit: Emit, *, keeps: bool) -> list[Any]:
    """Return [step → digest of the checkpoints on this keeper's disk, faults of manifests]."""
    held, problems = dict[str, str](), list[str]()
    if not keeps:
        return [held, problems]
    folders.remove_leftovers(root)
    for found in list_checkpoints(root):
        if only in (None, found.step):
            try:
                held[str(found.step)] = read_manifest(found.path).digest
            except DamagedFileError as damage:
                problems.append(str(damage))
                emit("checkpoint_damaged", folder=str(found.path), **damage.fields())
    return [held, problems]


def _choose_newest(held: Sequence[dict[str, str]]) -> tuple[int, str, list[int]] | None:
    """Return (step, digest, keepers that have it) of the newest checkpoint; None without any.

    Nodes that lost contact may both have gone on: then the digest that most keepers have counts; of
    equals the one of the lowest rank.

    >>> _choose_newest([{"4": "a", "8": "b"}, {}, {"8": "c"}, {"8": "c"}])
    (8, 'c', [2, 3])
    """
    steps = [int(step) for one in held for step in one]
    if not steps:
        return None
    step = max(steps)
    having: dict[str, list[int]] = {}
    for rank, one in enumerate(held):
        if str(step) in one:
            having.setdefault(one[str(step)], []).append(rank)
    digest = max(having, key=lambda name: (len(having[name]), -having[name][0]))
    return step, digest, having[digest]


def _find_damage(
    final: Path, having: Sequence[int], keepers: Keepers, world: World
) -> dict[int, dict[str, str]]:
    """Verify a checkpoint on every disk that has it, and return the faults (collective).

    The ranks that see one disk share the files to hash.

    Args:
        final: folder of the checkpoint, `step-N`.
        having: keepers whose disk has the checkpoint. The keeper of a disk is the lowest rank that
            sees it.
        keepers: by rank, the keeper of its disk.

    Returns:
        keeper → fields of its `DamagedFileError`; {} if all copies are intact.
    """

    def verify_own_disk() -> dict[str, str] | None:
        if keepers[world.rank] not in having:
            return None
        try:
            manifest = read_manifest(final)
            _verify_files(final, manifest, list(manifest.files), keepers, world)
        except DamagedFileError as damage:
            return damage.fields()
        return None

    told = gather_results(world, verify_own_disk)
    return {keepers[rank]: one for rank, one in reversed(list(enumerate(told))) if one}


def _verify_files(
    folder: Path, manifest: Manifest, names: Sequence[str], keepers: Keepers, world: World
) -> None:
    """Hash this rank's share of files on its disk.

    Raises:
        Damaged: a file differs from the manifest.
    """
    mates = [rank for rank, one in enumerate(keepers) if one == keepers[world.rank]]
    slices = slices_by_file(manifest)
    for name in names[mates.index(world.rank) :: len(mates)]:
        for problem in check_shard_file(folder, manifest, name, slices[name]):
            raise problem


def _plan_transfers(
    manifest: Manifest, having: dict[str, list[int]], wanting: set[int]
) -> list[FileTransfer]:
    """List the transfers; if several keepers have a file, each sends some of the files."""
    return [
        FileTransfer(having[name][number % len(having[name])], target, name, file.size_bytes)
        for target in sorted(wanting)
        for number, (name, file) in enumerate(manifest.files.items())
        if target not in having[name]
    ]
