"""Fetch the newest checkpoint of a remote folder into the run's own, if the local ones are older.

    rank 0      lists the remote steps newer than the local ones; the manifest, into `step-N.tmp-…`
    each rank   its share of the files, each copied once in all, and hashed
    rank 0      the rename to `step-N`, as in a save

From then on it is a checkpoint like any other. One that does not verify is reported, and the next
older one is tried.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.base.errors import CheckpointError, ClusterError
from shoal.checkpoint.agreement.collective_phase import gather_results, run_on_first_rank
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, RankFailed, short_path
from shoal.checkpoint.format.listing import (
    check_shard_file,
    list_checkpoints,
    read_manifest,
    slices_by_file,
    step_folder,
)
from shoal.checkpoint.format.manifest import FILE_NAME
from shoal.checkpoint.remote.remote_folder import RemoteFolder, RemoteFolderError
from shoal.fabric import World
from shoal.wire.phases import phase


def fetch_newest(
    root: Path,
    remote: RemoteFolder,
    below: str,
    world: World,
    tell: Callable[[str], None],
    only: int | None = None,
) -> None:
    """Fetch the newest complete step that is newer than all in `root`; every rank calls it.

    Args:
        below: as in `RemoteFolder`.
        tell: prints one line for the user; called on rank 0.
        only: the one step to fetch; None: any.

    Raises:
        ClusterError: on all ranks: a copy failed, or the store does not answer and no checkpoint is
            local.
        CheckpointError: all remote checkpoints are damaged, or one is of another Shoal.
    """
    try:
        steps = run_on_first_rank(world, lambda: _list_candidates(root, remote, below, tell, only))
        for step in steps:
            if damage := _fetch(root, remote, below, step, world):
                tell(f"checkpoint.remote = {remote.address}: {damage}; not taken")
                continue
            tell(f"checkpoint.remote = {remote.address}: step {step} was brought from there")
            return
    except RankFailed as failure:
        if failure.reason.startswith(f"checkpoint.remote = {remote.address}:"):  # on every rank
            raise ClusterError(f"{failure}; start the run again") from failure
        raise
    if steps and not run_on_first_rank(world, lambda: len(list_checkpoints(root))):
        raise CheckpointError(
            f"checkpoint.remote = {remote.address}: none of its {len(steps)} checkpoints is whole; "
            f"to start over, choose another one"
        )


def _list_candidates(
    root: Path, remote: RemoteFolder, below: str, tell: Callable[[str], None], only: int | None
) -> list[int]:
    """List the steps to try, newest first."""
    here = [found.step for found in list_checkpoints(root)]
    if only in here:
        return []
    try:
        steps = remote.steps(below)
    except RemoteFolderError as failure:
        if not here or only is not None:
            raise
        tell(f"{failure}; going on from the newest checkpoint that is here")
        return []
    if only is not None:
        return [step for step in steps if step == only]
    return [step for step in steps if step > max(here, default=-1)]


def _fetch(root: Path, remote: RemoteFolder, below: str, step: int, world: World) -> str:
    """Fetch one step; return its damage, "" for none.

    Raises:
        RankFailed: a copy failed on some rank.
    """
    final = step_folder(root, step)

    def prepare() -> dict[str, str]:
        try:
            manifest, data = remote.read_manifest(below, step)
        except DamagedFileError as damage:
            return {"damage": str(damage)}
        root.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(root)
        folders.check_space(root, manifest.size_bytes + len(data))
        folder = folders.make_temporary_path(final)
        folder.mkdir()
        _write(folder / FILE_NAME, data)
        return {"name": folder.name}

    told = run_on_first_rank(world, prepare)
    if "damage" in told:
        return str(told["damage"])
    folder = root / told["name"]

    def copy() -> str:
        mates = [r for r in range(world.size) if not world.keepers or world.keepers[r] == 0]
        if world.rank not in mates:
            return ""  # it gets them from there
        manifest = read_manifest(folder)
        own = list(slices_by_file(manifest).items())[mates.index(world.rank) :: len(mates)]
        with phase("fetch", of=len(own)) as counted:
            for name, slices in own:
                remote.get(below, step, name, folder / name)
                _sync(folder / name)
                for problem in check_shard_file(folder, manifest, name, slices):
                    return str(problem)
                counted.step()
        return ""

    def commit() -> None:
        if os.path.lexists(final):  # one of this name that was not complete
            folders.quarantine(final)
        folders.fsync_folder(folder)
        os.rename(folder, final)
        folders.fsync_folder(root)

    try:
        damage = next(filter(None, gather_results(world, copy)), "")
        if not damage:
            run_on_first_rank(world, commit)
        return damage.replace(short_path(folder), short_path(final))
    finally:
        if world.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # after a commit it has another name


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
