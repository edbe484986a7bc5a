"""Four processes on three disks, which ranks 0 and 1, 2, and 3 see; run by test_checkpoint_world.py.

Each rank's folder is another one where a machine would have its own under the same name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Heard, assert_same
from checkpoint_world import expected, main, offered, wanted

from shoal.base.errors import CheckpointError, ClusterError, ConfigError
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, verify
from shoal.checkpoint.load.read import open_newest
from shoal.checkpoint.remote.fetch_step import fetch_newest
from shoal.checkpoint.remote.remote_folder import RemoteFolder
from shoal.checkpoint.save import file_transfer, node_local, write
from shoal.fabric import World
from shoal.fabric.collectives.link_failures import send_and_receive
from shoal.fabric.duplicate_group import duplicate_world
from shoal.trainer.run_folder import node_local_resume as trainer_disks

MACHINES = [0, 0, 1, 2]
KEEPERS = (0, 0, 2, 3)


def own(root: Path, rank: int) -> Path:
    """The checkpoints of a run as a rank sees them."""
    return root.parent / f"disk{KEEPERS[rank]}" / root.name


def names(world: World, root: Path) -> list[str]:
    """What lies on a rank's disk once all are here."""
    world.barrier()
    told = sorted(os.listdir(own(root, world.rank)))
    world.barrier()
    return told


def save(
    world: World, root: Path, step: int, *, keep: int = 9, heard: Any = None
) -> write.SavedCheckpoint:
    """Save a step in parts of all ranks, from each its own record."""
    pieces = offered(step, world, {"model.a": 0, "model.c": 0})
    mine = own(root, world.rank)
    return write.save(mine, step, pieces, {"of": world.rank}, world, heard or Heard(), keep=keep)


def bring(world: World, root: Path, heard: Any = None) -> node_local.SyncedCheckpoint | None:
    """Have the newest on all disks, and go on from it."""
    mine = own(root, world.rank)
    found = node_local.sync_newest(mine, KEEPERS, world, heard or Heard())
    if found is not None:
        loaded = open_newest(mine, wanted(4, world.rank, 0), world, Heard(), found.step)
        assert loaded is not None
        assert_same(loaded.tensors, expected(found.step, 4, world.rank, 0))
        assert verify(mine / f"step-{found.step}") == []
    return found


def flip(path: Path) -> None:
    """Another bit in the last byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)


@contextmanager
def replaced(module: Any, name: str, other: Any, *, where: bool = True) -> Iterator[None]:
    """Another function in a module, on this rank."""
    real = getattr(module, name)
    if where:
        setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, real)


def check_who_sees_which_disk(world: World, root: Path) -> None:
    assert node_local.find_keepers(root.parent / "shared", world) == ()
    assert node_local.find_folder_keepers(root.parent / "shared" / "below", world) == ()
    world.keepers = node_local.find_keepers(own(root, world.rank).parent, world)
    assert world.keepers == KEEPERS
    assert world.writes_files == (world.rank != 1)
    world.barrier()
    assert os.listdir(own(root, world.rank).parent) == []
    with pytest.raises(ConfigError, match="rank 1 of 4 does not see what rank 0, on the same mach"):
        node_local.find_keepers(root.parent / f"alone{world.rank}", world)


def check_each_disk_has_every_checkpoint_whole(world: World, root: Path) -> None:
    heard = Heard()
    with replaced(file_transfer, "PIECE_BYTES", 300), replaced(file_transfer, "ROUND_PIECES", 2):
        saved = save(world, root, 1, heard=heard)
    assert verify(saved.path) == []
    manifest = read_manifest(saved.path)
    assert manifest.record == {"of": 0}
    assert len(manifest.files) == 4
    assert max(one.size_bytes for one in manifest.files.values()) > 4 * 300
    assert len(set(world.gather_json(manifest.digest))) == 1
    assert len(heard.named("checkpoint_saved")) == (1 if world.rank in KEEPERS else 0)
    assert save(world, root, 1).existed
    found = bring(world, root)
    assert found == node_local.SyncedCheckpoint(1, 0, {})


def check_old_ones_go_on_every_disk(world: World, root: Path) -> None:
    for step in (2, 3, 4):
        save(world, root, step, keep=2)
    assert names(world, root) == ["step-3", "step-4"]


def check_a_disk_that_is_empty_and_a_stale_one_get_the_newest(world: World, root: Path) -> None:
    if world.rank == 2:
        shutil.rmtree(own(root, 2))
    if world.rank == 3:
        shutil.rmtree(own(root, 3) / "step-4")
    world.barrier()
    assert bring(world, root) == node_local.SyncedCheckpoint(4, 0, {2: 0, 3: 3})
    assert names(world, root) == (["step-4"] if world.rank == 2 else ["step-3", "step-4"])


def check_what_is_damaged_comes_again_from_who_has_it_whole(world: World, root: Path) -> None:
    heard = Heard()
    if world.is_first:
        flip(own(root, 0) / "step-4" / "rank-2.safetensors")
    if world.rank == 3:
        shutil.rmtree(own(root, 3) / "step-4")
    world.barrier()
    assert bring(world, root, heard) == node_local.SyncedCheckpoint(4, 2, {0: 3, 3: 3})
    told = heard.named("checkpoint_damaged")
    assert [one["file"] for one in told] == (
        ["checkpoints/step-4/rank-2.safetensors"] if world.is_first else []
    )
    assert ("step-4.damaged" in names(world, root)) == (world.rank < 2)


def check_what_nobody_has_whole_gives_way_to_the_one_before(world: World, root: Path) -> None:
    save(world, root, 5, keep=2)
    world.barrier()
    if world.writes_files:
        flip(own(root, world.rank) / "step-5" / f"rank-{world.rank}.safetensors")
    world.barrier()
    assert bring(world, root) == node_local.SyncedCheckpoint(4, 0, {})
    assert "step-5" in names(world, root)  # whose copies are all damaged: for a person to look at
    save(world, root, 5, keep=2)
    assert "step-5.damaged" in names(world, root)
    assert bring(world, root) == node_local.SyncedCheckpoint(5, 0, {})


def check_a_manifest_that_is_damaged_is_no_candidate(world: World, root: Path) -> None:
    if world.rank == 2:
        flip(own(root, 2) / "step-5" / "manifest.json")
    world.barrier()
    assert bring(world, root) == node_local.SyncedCheckpoint(5, 0, {2: 4})
    assert ("step-5.damaged-2" in names(world, root)) == (world.rank == 2)


def check_of_two_futures_the_one_that_most_have_counts(world: World, root: Path) -> None:
    save(world, root, 6, keep=2)
    world.barrier()
    aside = own(root, world.rank).parent / "aside"
    if world.is_first:
        shutil.copytree(own(root, 0) / "step-6", aside)
    world.barrier()
    if world.writes_files:
        shutil.rmtree(own(root, world.rank) / "step-6")
    world.barrier()
    pieces = offered(6, world, {"model.b": 1})  # cut otherwise, so the digest is another
    write.save(own(root, world.rank), 6, pieces, {}, world, Heard(), keep=2)
    world.barrier()
    if world.is_first:
        shutil.rmtree(own(root, 0) / "step-6")
        aside.rename(own(root, 0) / "step-6")
    world.barrier()
    assert bring(world, root) == node_local.SyncedCheckpoint(6, 2, {0: 5})
    assert ("step-6.other" in names(world, root)) == (world.rank < 2)


def check_a_disk_that_does_not_take_it_fails_the_save_on_all(world: World, root: Path) -> None:
    before = names(world, root)

    def full(descriptor: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    heard = Heard()
    with (
        replaced(file_transfer, "write_all", full, where=world.rank == 2),
        pytest.raises(CheckpointError, match="step-7 was not saved: rank 2: .*No space left on d"),
    ):
        save(world, root, 7, heard=heard)
    assert names(world, root) == before
    assert len(heard.named("checkpoint_failed")) == (1 if world.writes_files else 0)
    small = replaced(folders, "check_space", _refuse, where=world.rank == 3)
    with small, pytest.raises(CheckpointError, match="rank 3: it needs 9 GiB, 1 GiB are free"):
        save(world, root, 7)
    assert names(world, root) == before


def _refuse(root: Path, needed_bytes: int) -> None:
    raise CheckpointError("it needs 9 GiB, 1 GiB are free on this disk")


def check_bytes_that_come_otherwise_are_never_used(world: World, root: Path) -> None:
    if world.rank == 3:
        shutil.rmtree(own(root, 3) / "step-6")
    before = names(world, root)

    def altered(among: Any, out: Any, into: Any) -> None:
        send_and_receive(among, out, into)
        if into is not None:
            into[1][-1] ^= 4

    with (
        replaced(file_transfer, "send_and_receive", altered, where=world.rank == 3),
        pytest.raises(CheckpointError, match="step-6 was not brought from a peer: rank 3: .*hash"),
    ):
        bring(world, root)
    assert names(world, root) == before
    assert bring(world, root) == node_local.SyncedCheckpoint(6, 0, {3: 5})


def check_rows_that_are_too_many_are_said(world: World, root: Path) -> None:
    """Steps 1 to 9 are on the disk of rank 3, rank 0's ends at 2 and has a row taken again."""
    folder, heard = own(root, world.rank).parent, Heard()
    rows = [json.dumps({"step": step, "loss": 0.5}) for step in range(1, 10)]
    if world.writes_files:
        kept = rows if world.rank == 3 else rows[:3]
        (folder / "metrics.jsonl").write_text("\n".join([*kept, ""]))
    found = node_local.SyncedCheckpoint(8, 3, {0: 2})
    with replaced(trainer_disks, "ROWS_BYTES", 3 * len(rows[0]) + len(rows[0]) // 2):
        trainer_disks.sync_metrics_rows(folder, found, KEEPERS, world, heard)
    if world.rank == 0:
        have = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
        assert have == [1, 2, 7, 8]  # of the newest three that were sent one is of a later step
        (line,) = [one["text"] for one in heard.named("notice")]
        assert "so did 2 rows of metrics.jsonl" in line
        assert "the rows of 4 more steps after step 2 are there alone" in line
    else:
        assert not heard.events
    world.barrier()


def check_what_a_remote_folder_has_comes_to_every_disk(world: World, root: Path) -> None:
    remote = RemoteFolder(f"file://{root.parent}/remote")
    if world.is_first:
        remote.upload_checkpoint(own(root, 0) / "step-6", "", 9)
    world.barrier()
    if world.writes_files:
        shutil.rmtree(own(root, world.rank) / "step-6")
    world.barrier()
    heard: list[str] = []
    fetch_newest(own(root, world.rank), remote, "", world, heard.append)
    assert ("step-6" in names(world, root)) == (world.rank < 2)
    assert bring(world, root) == node_local.SyncedCheckpoint(6, 0, {2: 5, 3: 5})


def check_a_sender_whose_file_ends_early_is_named(world: World, root: Path) -> None:
    if world.rank == 3:
        shutil.rmtree(own(root, 3) / "step-6")
    world.barrier()
    real = node_local.transfer_files

    def shorter(among: World, sent: Any, source_of: Any, target_of: Any) -> None:
        for one in sent:
            if world.rank == one.source == 0:
                os.truncate(source_of(one), one.size_bytes - 1)
        real(among, sent, source_of, target_of)

    with (
        replaced(node_local, "transfer_files", shorter),
        pytest.raises(CheckpointError, match="rank 0: .*was cut short while it was read"),
    ):
        bring(world, root)
    assert bring(world, root) == node_local.SyncedCheckpoint(6, 2, {0: 5, 3: 5})


def check_a_peer_that_sends_nothing_is_waited_for_no_longer_than_told(
    world: World, root: Path
) -> None:
    other = duplicate_world(world)  # it is of no use afterwards
    began_s = time.monotonic()
    if world.rank == 0:
        with pytest.raises(ClusterError, match="no bytes pass between it and rank 1 within 0.5 s"):
            send_and_receive(
                other.group, None, (1, torch.empty(8, dtype=torch.uint8)), within_s=0.5
            )
        assert time.monotonic() - began_s < 5
    world.barrier()
    other.group = None


def check_nothing_that_can_be_read_is_somebodys_decision(world: World, root: Path) -> None:
    if world.writes_files:
        for found in list_checkpoints(own(root, world.rank)):
            flip(found.path / "manifest.json")
    world.barrier()
    for _ in range(2):  # a restart does not make it another's decision
        with pytest.raises(CheckpointError, match="no node has a checkpoint that can be read"):
            bring(world, root)
        world.barrier()


if __name__ == "__main__":
    main(globals(), MACHINES)
