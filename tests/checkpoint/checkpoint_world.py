"""Four gloo processes that save and load together; run by test_checkpoint_world.py, once.

Prints one JSON line per check: {"check": …, "failures": {rank: traceback}}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Heard, assert_same, cut, whole

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.export.export_file import export_file
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, verify
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.format.stored_shard import StoredShardReader
from shoal.checkpoint.load import shared_read
from shoal.checkpoint.load.read import load, open_newest
from shoal.checkpoint.save import shard_writer, write
from shoal.fabric import World, start_world
from shoal.launch.processes import PrivateStore

SIZE = 4
WRITER = "write_file"


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The same on every rank: uneven sizes, so that shares differ."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(13, 6, generator=generator),
        "model.b": torch.randn(3, 10, generator=generator).bfloat16(),
        "model.c": torch.randn(400, generator=generator),
        "model.d": torch.randn(390, generator=generator),
        "optimizer.step": torch.tensor(step),
    }


def offered(step: int, world: World, dims: dict[str, int]) -> list[write.Piece]:
    """Tensors in `dims` are cut along that dim over the ranks; the others are replicas."""
    result = []
    for name, tensor in tensors(step).items():
        if name in dims:
            box, data = cut(tensor, world.size, world.rank, dims[name])
            shard = whole(name, tensor)
            result.append(write.Piece(Shard(name, shard.global_shape, shard.dtype, (box,)), data))
        else:
            result.append(write.Piece(whole(name, tensor), tensor))
    return result


def wanted(degree: int, rank: int, dim: int) -> Callable[[Manifest], list[Shard]]:
    """Every matrix cut in `degree` parts along `dim`, this rank's part; the rest whole."""

    def shards(manifest: Manifest) -> list[Shard]:
        result = []
        for name, stored in manifest.tensors.items():
            box = tuple((0, n) for n in stored.shape)
            if len(stored.shape) == 2:
                box = cut(torch.empty(stored.shape), degree, rank, dim)[0]
            result.append(Shard(name, stored.shape, stored.dtype, (box,)))
        return result

    return shards


def expected(step: int, degree: int, rank: int, dim: int) -> dict[str, torch.Tensor]:
    return {
        name: cut(tensor, degree, rank, dim)[1].contiguous() if tensor.dim() == 2 else tensor
        for name, tensor in tensors(step).items()
    }


def check_replicas_are_dealt_to_one_writer_each(world: World, root: Path) -> None:
    heard = Heard()
    saved = write.save(root, 1, offered(1, world, {}), {"rank": world.rank}, world, heard, keep=5)
    manifest = read_manifest(saved.path)
    assert verify(saved.path) == []
    assert manifest.record == {"rank": 0}
    names = [name for name, t in manifest.tensors.items() for _ in t.slices]
    assert sorted(names) == sorted(tensors(1))
    by_file = {name: t.slices[0].file for name, t in manifest.tensors.items() if len(t.slices) == 1}
    assert len({by_file[n] for n in ("model.a", "model.b", "model.c", "model.d")}) == 4
    assert len(heard.named("checkpoint_saved")) == (1 if world.is_first else 0)


def check_slices_of_four_ranks_load_on_any_split(world: World, root: Path) -> None:
    dims = {"model.a": 0, "model.b": 1, "model.c": 0}
    path = write.save(root, 2, offered(2, world, dims), {}, world, Heard(), keep=5).path
    assert len(read_manifest(path).tensors["model.a"].slices) == 4
    for degree in (1, 2, 3, 4):
        for dim in (0, 1):
            loaded = open_newest(root, wanted(degree, world.rank % degree, dim), world, Heard())
            assert loaded is not None
            assert loaded.step == 2
            assert_same(loaded.tensors, expected(2, degree, world.rank % degree, dim))
    out = root.parent / f"export-{world.rank}.safetensors"
    export_file(path, out)
    alone = load(path, [whole("model.a", tensors(2)["model.a"])])
    assert torch.equal(alone["model.a"], tensors(2)["model.a"])


def check_failure_on_rank_1_is_raised_on_all(world: World, root: Path) -> None:
    heard, real = Heard(), shard_writer.write_file

    def full(path: Path, *more: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        setattr(shard_writer, WRITER, full)
    with pytest.raises(CheckpointError) as caught:
        write.save(root, 3, offered(3, world, {"model.a": 0}), {}, world, heard, keep=5)
    setattr(shard_writer, WRITER, real)
    text = str(caught.value)
    assert "step-3 was not saved: rank 1: " in text
    assert "No space left on device" in text
    assert len(set(world.gather_json(text))) == 1
    assert sorted(os.listdir(root)) == ["step-1", "step-2"]
    events = heard.named("checkpoint_failed")
    assert len(events) == (1 if world.is_first else 0)
    assert all(event["rank"] == 1 and event["step"] == 3 for event in events)
    write.save(root, 3, offered(3, world, {"model.a": 0}), {}, world, heard, keep=5)
    assert verify(root / "step-3") == []


def check_one_rank_without_its_slice_is_raised_on_all(world: World, root: Path) -> None:
    mine = offered(4, world, {"model.a": 0})[1 if world.rank == 2 else 0 :]
    with pytest.raises(CheckpointError, match=r"model.a \[13, 6\]: slices hold 60 of 78 elements"):
        write.save(root, 4, mine, {}, world, Heard(), keep=5)


def check_all_ranks_fall_back_together(world: World, root: Path) -> None:
    if world.is_first:  # only rank 3 wants these bytes
        (piece,) = [
            p for p in read_manifest(root / "step-3").tensors["model.a"].slices if p.box[0][1] == 13
        ]
        file = root / "step-3" / piece.file
        raw = bytearray(file.read_bytes())
        data = cut(tensors(3)["model.a"], 4, 3)[1].contiguous().numpy().tobytes()
        raw[raw.index(data) + 5] ^= 4
        file.write_bytes(raw)
    world.barrier()
    heard = Heard()
    loaded = open_newest(root, wanted(4, world.rank, 0), world, heard)
    assert loaded is not None
    assert loaded.step == 2
    assert_same(loaded.tensors, expected(2, 4, world.rank, 0))
    events = heard.named("checkpoint_damaged")
    assert len(events) == (1 if world.is_first else 0)
    for event in events:
        assert event["rank"] == 3
        assert event["tensor"] == "model.a [9:13, :]"
        assert event["file"] == "checkpoints/step-3/rank-3.safetensors"


def check_what_all_want_is_read_once_and_handed_on(world: World, root: Path) -> None:
    read: list[str] = []
    plain, least = StoredShardReader.read, shared_read.LEAST_BYTES

    def noted(self: StoredShardReader, name: str, *more: Any) -> None:
        read.append(name)
        plain(self, name, *more)

    shared_read.LEAST_BYTES = 0
    StoredShardReader.read = noted
    try:
        for degree, once in (
            (1, set(tensors(2))),
            (4, {n for n, t in tensors(2).items() if t.dim() != 2}),
        ):
            read.clear()
            loaded = open_newest(root, wanted(degree, world.rank % degree, 1), world, Heard(), 2)
            assert_same(loaded.tensors, expected(2, degree, world.rank % degree, 1))
            everyone = [name for names in world.gather_json(read) for name in names]
            pieces = read_manifest(root / "step-2").tensors
            for name in once:
                assert everyone.count(name) == len(pieces[name].slices), name
            if degree == 1:
                assert 0 < len(read) < len(everyone)
    finally:
        StoredShardReader.read, shared_read.LEAST_BYTES = plain, least


def check_a_flipped_byte_in_a_share_is_named_and_all_fall_back(world: World, root: Path) -> None:
    least, file, damaged = shared_read.LEAST_BYTES, Path(), b""
    shared_read.LEAST_BYTES = 0
    try:
        if world.is_first:
            (piece,) = read_manifest(root / "step-3").tensors["model.c"].slices
            file = root / "step-3" / piece.file
            damaged = file.read_bytes()
            raw = bytearray(damaged)
            raw[raw.index(tensors(3)["model.c"].numpy().tobytes()) + 5] ^= 4
            file.write_bytes(raw)
        world.barrier()
        heard = Heard()
        loaded = open_newest(root, wanted(1, 0, 0), world, heard)
        assert loaded.step == 2
        assert_same(loaded.tensors, expected(2, 1, 0, 0))
        if world.is_first:
            (event,) = heard.named("checkpoint_damaged")
            assert event["tensor"] == "model.c [:]"
            file.write_bytes(damaged)
        world.barrier()
    finally:
        shared_read.LEAST_BYTES = least


def check_same_step_again_verifies_on_all_ranks_and_renames(world: World, root: Path) -> None:
    again = write.save(root, 2, offered(2, world, {}), {}, world, Heard(), keep=5)
    assert again.existed
    heard = Heard()
    saved = write.save(root, 3, offered(3, world, {"model.a": 1}), {}, world, heard, keep=1)
    assert not saved.existed
    assert verify(saved.path) == []
    world.barrier()
    assert sorted(os.listdir(root)) == ["step-3", "step-3.damaged"]
    assert len(heard.named("checkpoint_damaged")) == (1 if world.is_first else 0)


def check_a_refusal_on_one_rank_stops_all(world: World, root: Path) -> None:
    def refuse(manifest: Manifest) -> list[Shard]:
        if world.rank == 2:
            raise ConfigError("optimizer.lr = 2: was 1")
        return []

    with pytest.raises((ConfigError, CheckpointError)) as caught:
        open_newest(root, refuse, world, Heard())
    here = world.rank == 2
    assert isinstance(caught.value, ConfigError) == here
    assert str(caught.value) == ("" if here else "rank 2: ") + "optimizer.lr = 2: was 1"


def check_ranks_that_see_different_files_refuse(world: World, root: Path) -> None:
    own = root if world.rank else root.parent / "elsewhere"
    if world.is_first:
        write.save(own, 3, offered(9, _alone(), {}), {}, _alone(), Heard(), keep=1)
    world.barrier()
    with pytest.raises(CheckpointError, match="ranks read different manifests; the run folder"):
        open_newest(own, wanted(1, 0, 0), world, Heard())


def check_more_ranks_than_tensors(world: World, root: Path) -> None:
    one = torch.arange(3.0)
    path = write.save(root, 9, [write.Piece(whole("w", one), one)], {}, world, Heard(), keep=9).path
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-0.safetensors"]
    assert [found.step for found in list_checkpoints(root)] == [9, 3]


def _alone() -> World:
    from checkpoint_cases import alone

    return alone()


def _rank_main(
    rank: int, store: PrivateStore, folder: Path, checks: Mapping[str, Any], machines: Sequence[int]
) -> None:
    local = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    environ = {
        "SHOAL_STORE": store.path,
        "RANK": str(rank),
        "LOCAL_RANK": str(local.index(rank)),
        "WORLD_SIZE": str(len(machines)),
        "LOCAL_WORLD_SIZE": str(len(local)),
    }
    world = start_world(environ)
    for name, check in list(checks.items()):
        if name.startswith("check_"):
            trouble = None
            try:
                check(world, folder / "checkpoints")
            except (Exception, pytest.fail.Exception):
                trouble = traceback.format_exc()
            troubles = world.gather_json(trouble)
            if rank == 0:
                failures = {str(r): t for r, t in enumerate(troubles) if t}
                sys.stdout.write(json.dumps({"check": name, "failures": failures}) + "\n")
                sys.stdout.flush()
    world.close()


def main(checks: Mapping[str, Any], machines: Sequence[int]) -> None:
    """Fork the ranks, so that torch is imported once; wait for them.

    checks     functions by their names, of which those called check_… are
    machines   of each rank the one on which it believes to be
    """
    torch.set_num_threads(1)
    store = PrivateStore()
    children = []
    for rank in range(len(machines)):
        child = os.fork()
        if child == 0:
            _rank_main(rank, store, Path(sys.argv[1]), checks, machines)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) and 1)


if __name__ == "__main__":
    main(globals(), [0] * SIZE)
