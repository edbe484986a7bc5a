"""Save a run: every rank writes its share at once; the checkpoint appears complete or not at all.

    collect   agreement on writers, from all offers; this rank's share as bytes in host memory
    prepare   rank 0: clear leftovers, check free space, make the folder `step-N.tmp-<id>`
    write     each rank alone: `rank-K.safetensors` in it, fsync, read back, compare
    commit    rank 0: manifest, fsync, rename to `step-N`, fsync the parent; then delete beyond keep

After each phase all ranks learn of a failure on any. Then the temporary folder is deleted, older
checkpoints are as they were, and every rank raises the same CheckpointError, after which training
may go on. `save` does all of it while its caller waits; `background_save` in a second thread.

Source: write beside, fsync, verify, rename (reliability §4); ours adds digests of every byte and
one verdict for all ranks.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.runlog.events import Emit
from shoal.base.runlog.folder_owner import REPLACED, FolderOwner
from shoal.checkpoint.agreement.collective_phase import gather_results, run_on_first_rank
from shoal.checkpoint.agreement.rank_pieces import CheckpointShare, Piece, collect_share
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, RankFailed, short_path
from shoal.checkpoint.format.listing import (
    check_shard_file,
    read_manifest,
    slices_by_file,
    step_folder,
)
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.save.shard_writer import join_parts, write_shard
from shoal.fabric import World

__all__ = ["Piece", "SaveTarget", "SavedCheckpoint", "save", "save_collected"]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk, as a save left it.

    Attributes:
        size_bytes: of all shard files.
        save_s: seconds of the save, or of the verification.
        existed: True if it was there before and verified, so that nothing was written.
    """

    path: Path
    step: int
    size_bytes: int
    save_s: float
    existed: bool = False


@dataclass(frozen=True)
class SaveTarget:
    """Destination and record of a save; equal on all ranks but for the record.

    Attributes:
        root: the folder of all checkpoints.
        step: determines the name `step-N`.
        record: free JSON, kept in the manifest; rank 0's is taken.
        keep: newest complete checkpoints that stay, this one included; ConfigError below 1.
        owner: of the run folder, as it is when the save begins.
    """

    root: Path
    step: int
    record: dict[str, Any]
    keep: int

    owner: FolderOwner = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep = {self.keep}: at least 1; try: checkpoint.keep=1")
        above = self.root.parents
        tag = len(above) > 2 and above[1].name == "tags"
        object.__setattr__(self, "owner", FolderOwner(above[2 if tag else 0]))
        self.owner.record_identity()

    @property
    def final(self) -> Path:
        """Path of the checkpoint folder that the save creates."""
        return step_folder(self.root, self.step)

    def check(self) -> None:
        """Refuse to go on if the run folder was replaced since the save began.

        Raises:
            CheckpointError: another folder has its path.
        """
        if self.owner.state() == REPLACED:
            raise CheckpointError(f"another folder lies at {self.owner.folder} now")


def save(
    root: Path,
    step: int,
    pieces: Sequence[Piece],
    record: dict[str, Any],
    world: World,
    emit: Emit,
    *,
    keep: int,
    aliases: Mapping[str, str] | None = None,
) -> SavedCheckpoint:
    """Write the state of `step` as `root/step-N`; every rank calls it, with the pieces it holds.

    A complete `step-N` that verifies is kept and returned; a damaged one becomes `step-N.damaged`.

    Args:
        pieces: equal (name, box) on several ranks are replicas: one of them is written.
        record: free JSON, kept in the manifest; rank 0's is taken.
        keep: newest complete checkpoints that stay, this one included, older ones being deleted;
            those of later steps are neither counted nor touched.
        aliases: tied name → the name that is written; pieces of a tied name are left out.
        emit: rank 0 emits `checkpoint_saved` or `checkpoint_failed`, neither where `step-N` stays;
            `checkpoint_damaged` for a damaged one, `notice` where old ones cannot be deleted.

    Raises:
        CheckpointError: the same on all ranks, when any rank failed (disk full, slices missing,
            read-back differs): older checkpoints are untouched.
        ConfigError: keep < 1.
        ClusterError: the process group was left meanwhile.
    """
    target = SaveTarget(root, step, record, keep)
    return save_collected(target, lambda: collect_share(pieces, aliases or {}, world), world, emit)


def save_collected(
    target: SaveTarget, collecting: Callable[[], CheckpointShare], world: World, emit: Emit
) -> SavedCheckpoint:
    """Save as `save`, from any source of bytes in host memory; every rank calls it.

    Args:
        collecting: returns this rank's share; may raise RankFailed, on all ranks alike.
    """
    began_s = time.perf_counter()
    root, step, final = target.root, target.step, target.final
    if world.keepers:
        from shoal.checkpoint.save.node_local import find_folder_keepers, save_on_each_disk

        if keepers := find_folder_keepers(root, world):
            told = (final, step, target.record, target.keep)
            size_bytes, existed = save_on_each_disk(*told, keepers, collecting, world, emit)
            return SavedCheckpoint(final, step, size_bytes, time.perf_counter() - began_s, existed)
    temporary: Path | None = None
    try:
        collected = collecting()
        existing = _find_existing(target, world, emit)
        if existing is not None:
            return SavedCheckpoint(
                final, step, existing.size_bytes, time.perf_counter() - began_s, True
            )
        agreed = collected.agreement
        name = run_on_first_rank(
            world, lambda: folders.make_step_folder(final, agreed.disk_bytes(target.record)).name
        )
        folder = temporary = root / name
        parts = gather_results(world, lambda: write_shard(folder, world.rank, collected.blocks))
        size_bytes = run_on_first_rank(
            world,
            lambda: _commit(target, folder, join_parts(step, parts, agreed.aliases, target.record)),
        )
    except RankFailed as failure:
        if world.is_first:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            emit("checkpoint_failed", step=step, rank=failure.rank, reason=failure.reason)
        world.barrier()  # when this returns, the temporary folder is gone for every rank
        raise CheckpointError(
            f"{short_path(final)} was not saved: {failure}; older checkpoints are as they were"
        ) from failure
    save_s = time.perf_counter() - began_s
    if world.is_first:
        emit("checkpoint_saved", step=step, folder=str(final), bytes=size_bytes, seconds=save_s)
        _delete_old_steps(root, step, target.keep, emit)
    return SavedCheckpoint(final, step, size_bytes, save_s)


def _commit(target: SaveTarget, folder: Path, manifest: Manifest) -> int:
    target.check()
    return folders.commit(folder, target.final, manifest)


def _find_existing(target: SaveTarget, world: World, emit: Emit) -> Manifest | None:
    """Return the manifest of a verified checkpoint of this name; rename a damaged one.

    The ranks share the reading: rank r verifies files r, r + size, r + 2·size, …
    """
    final = target.final

    def is_there() -> bool:
        target.check()
        return os.path.lexists(final)

    if not run_on_first_rank(world, is_there):
        return None
    manifests: list[Manifest] = []

    def verify_share() -> dict[str, str] | None:
        try:
            manifest = read_manifest(final)
        except DamagedFileError as damage:
            return damage.fields()
        manifests.append(manifest)
        for name, slices in list(slices_by_file(manifest).items())[world.rank :: world.size]:
            for problem in check_shard_file(final, manifest, name, slices):
                return problem.fields()
        return None

    problems = [problem for problem in gather_results(world, verify_share) if problem]
    if not problems:
        return manifests[0]
    kept_as = run_on_first_rank(world, lambda: str(folders.quarantine(final)))
    if world.is_first:
        emit("checkpoint_damaged", folder=str(final), kept_as=kept_as, **problems[0])
    return None


def _delete_old_steps(root: Path, step: int, keep: int, emit: Emit) -> None:
    try:
        folders.delete_old_steps(root, step, keep)
    except OSError as failure:
        # The new checkpoint is safe; an old one that cannot be deleted only costs space.
        emit(
            "notice",
            step=step,
            text=f"{short_path(root)}: old checkpoints stay: {failure.strerror}",
        )
