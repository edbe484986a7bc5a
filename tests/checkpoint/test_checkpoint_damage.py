"""Damage: every flipped byte is found and named, nothing foreign is run, and older ones step in."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_cases import Heard, alone, assert_same, save_step, state, wanted_all

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import Box
from shoal.checkpoint.format import stored_shard
from shoal.checkpoint.format.boxes import format_box
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, DamagedStepError
from shoal.checkpoint.format.listing import read_manifest, verify
from shoal.checkpoint.format.manifest import StoredFile, encode
from shoal.checkpoint.load import read


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_step(tmp_path / "checkpoints", 5).path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    save_step(root, 4)
    save_step(root, 5)
    return root


def _owners(path: Path) -> dict[int, str]:
    """For each byte offset of the shard file: the tensor that lies there, "" for the header."""
    raw = (path / "rank-0.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    owners = dict.fromkeys(range(length), "")
    for key, field in json.loads(raw[8:length]).items():
        if key != "__metadata__":
            begin, end = field["data_offsets"]
            owners |= dict.fromkeys(range(length + begin, length + end), key)
    return owners


def _flipped(file: Path, offset: int, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1 << bit
    file.write_bytes(raw)


def test_every_flipped_byte_of_a_shard_is_named(checkpoint: Path) -> None:
    file, owners = checkpoint / "rank-0.safetensors", _owners(checkpoint)
    original, choose = file.read_bytes(), random.Random(0)
    manifest = read_manifest(checkpoint)
    assert sorted(owners) == list(range(len(original)))
    for offset, name in owners.items():
        if not name and offset > 16 and offset % 5:
            continue  # the header is one hash: a sample of its bytes is enough
        _flipped(file, offset, choose.randrange(8))
        problems = verify(checkpoint)
        what = (
            f"{name} {format_box(_box(manifest, name), manifest.tensors[name].shape)}".strip()
            if name
            else "header"
        )
        assert problems == [
            f"checkpoints/step-5/{file.name}: {what} does not match its hash in manifest.json"
        ], offset
        if offset % 7 == 0:
            with pytest.raises(DamagedFileError) as caught:
                read.load(checkpoint, wanted_all(manifest))
            assert str(caught.value) == problems[0]
        file.write_bytes(original)


def _box(manifest: read.Manifest, name: str) -> Box:
    return manifest.tensors[name].slices[0].box


def test_flipped_bytes_of_the_manifest_are_found(checkpoint: Path) -> None:
    file, choose = checkpoint / "manifest.json", random.Random(1)
    original = file.read_bytes()
    for offset in sorted(choose.sample(range(len(original)), len(original) // 4)):
        _flipped(file, offset, choose.randrange(8))
        (problem,) = verify(checkpoint)
        assert problem.startswith("checkpoints/step-5/manifest.json: "), offset
        file.write_bytes(original)
    for longer in (
        original + b"\n",
        original[:-1],
        b" " + original,
        original.replace(b",", b", ", 1),
    ):
        file.write_bytes(longer)
        with pytest.raises(DamagedFileError, match="does not match its own digest"):
            read_manifest(checkpoint)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
def test_truncated_longer_and_missing_files(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    original = file.read_bytes()
    for length in {0, 1, 7, 8, 9, len(original) // 2, len(original) - 1}:
        file.write_bytes(original[:length])
        (problem,) = verify(checkpoint)
        assert f"step-5/{name}" in problem
        if name != "manifest.json":
            assert f"has {length} bytes, manifest.json says {len(original)}" in problem
    file.write_bytes(original + b"\0")
    assert len(verify(checkpoint)) == 1
    file.unlink()
    (problem,) = verify(checkpoint)
    assert f"checkpoints/step-5/{name}: is missing" in problem
    file.mkdir()
    assert len(verify(checkpoint)) == 1


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("the reader waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
def test_a_named_pipe_does_not_hang_the_reader(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with _deadline(10):
        (problem,) = verify(checkpoint)
    assert "is not a regular file" in problem


def test_all_problems_of_several_are_listed(checkpoint: Path) -> None:
    owners = _owners(checkpoint)
    for name in ("model.mask", "optimizer.step"):
        offset = min(o for o, owner in owners.items() if owner == name)
        _flipped(checkpoint / "rank-0.safetensors", offset, 0)
    (checkpoint / "notes.txt").write_text("mine")
    problems = verify(checkpoint)
    assert len(problems) == 3
    assert "model.mask [:] does not match" in "\n".join(problems)
    assert "optimizer.step does not match" in "\n".join(problems)
    assert problems[-1].startswith("checkpoints/step-5/notes.txt: is not listed in manifest.json")


class Canary:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("slot", ["manifest.json", "rank-0.safetensors", "data.pkl", ".metadata"])
def test_pickles_are_never_run(two: Path, tmp_path: Path, slot: str) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    (two / "step-5" / slot).write_bytes(payload)
    (problem,) = verify(two / "step-5")
    assert f"step-5/{slot}" in problem
    loaded = read.open_newest(two, wanted_all, alone(), Heard())
    assert loaded is not None
    assert loaded.step == (4 if slot in ("manifest.json", "rank-0.safetensors") else 5)
    assert not canary.exists()
    pickle.loads(payload)  # the canary works
    assert canary.exists()


def test_a_pickle_that_the_manifest_vouches_for_is_not_run_either(
    two: Path, tmp_path: Path
) -> None:
    path, canary = two / "step-5", tmp_path / "canary"
    payload = (8).to_bytes(8, "little") + pickle.dumps(Canary(canary))
    (path / "rank-0.safetensors").write_bytes(payload)
    manifest = read_manifest(path)
    forged = StoredFile(len(payload), hashlib.sha256(payload[:16]).hexdigest())
    (path / "manifest.json").write_bytes(
        encode(replace(manifest, files={"rank-0.safetensors": forged}))
    )
    assert verify(path) == ["checkpoints/step-5/rank-0.safetensors: the header is not JSON"]
    assert not canary.exists()


def test_forged_headers_are_refused(two: Path) -> None:
    path = two / "step-5"
    manifest, file = read_manifest(path), path / "rank-0.safetensors"
    cases: list[tuple[object, bytes, str]] = [
        ([1], b"", "is not a safetensors header"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, b"9" * 9, "other bytes"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"c" * 12, "other bytes"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"d" * 9, "describes"),
        ({"w": {"dtype": "OBJ", "shape": [2], "data_offsets": [0, 8]}}, b"e" * 8, "not a safetens"),
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            b"f" * 8,
            "does not list it",
        ),
    ]
    for header, data, text_ in cases:
        body = json.dumps(header).encode()
        raw = len(body).to_bytes(8, "little") + body
        file.write_bytes(raw + data)
        forged = StoredFile(len(raw + data), hashlib.sha256(raw).hexdigest())
        (path / "manifest.json").write_bytes(
            encode(replace(manifest, files={"rank-0.safetensors": forged}))
        )
        problems = "\n".join(verify(path))
        assert text_ in problems, problems
        if text_ == "does not list it":
            assert "model.up.weight [:, :] is not in this file" in problems


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_a_manifest_that_differs_from_a_header_is_refused(two: Path, dtype: str) -> None:
    """Else a wider dtype would leave part of the tensor as whatever was in memory."""
    path, name = two / "step-5", "model.up.weight"
    manifest = read_manifest(path)
    other = replace(manifest.tensors[name], dtype=dtype)
    forged = replace(manifest, tensors={**manifest.tensors, name: other})
    (path / "manifest.json").write_bytes(encode(forged))
    text_ = f"{name} [:, :] has another shape or dtype than manifest.json says"
    assert verify(path) == [f"checkpoints/step-5/rank-0.safetensors: {text_}"]
    with pytest.raises(DamagedFileError, match="has another shape or dtype"):
        read.load(path, wanted_all(forged))


def test_a_header_length_beyond_the_file_is_refused(two: Path) -> None:
    path = two / "step-5"
    file = path / "rank-0.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert verify(path) == [
        "checkpoints/step-5/rank-0.safetensors: header does not match its hash in manifest.json"
    ]


@pytest.fixture
def broken(two: Path) -> Path:
    offset = min(o for o, name in _owners(two / "step-5").items() if name == "model.up.weight")
    _flipped(two / "step-5" / "rank-0.safetensors", offset, 3)
    return two


def test_the_newest_readable_one_is_opened_and_the_damage_told_once(broken: Path) -> None:
    heard = Heard()
    loaded = read.open_newest(broken, wanted_all, alone(), heard)
    assert loaded is not None
    assert loaded.step == 4
    assert loaded.path == broken / "step-4"
    assert_same(loaded.tensors, state(4))
    (event,) = heard.named("checkpoint_damaged")
    assert event["file"] == "checkpoints/step-5/rank-0.safetensors"
    assert event["tensor"] == "model.up.weight [:, :]"
    assert event["reason"] == "does not match its hash in manifest.json"
    assert len(heard.events) == 1
    assert (broken / "step-5").is_dir()


def test_damage_in_a_tensor_that_nobody_wants_does_not_stop_a_load(broken: Path) -> None:
    loaded = read.open_newest(
        broken, lambda m: [s for s in wanted_all(m) if "up" not in s.name], alone(), Heard()
    )
    assert loaded is not None
    assert loaded.step == 5


def test_all_damaged_is_an_error_not_a_fresh_start(broken: Path) -> None:
    (broken / "step-4" / "rank-0.safetensors").unlink()
    heard = Heard()
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints can be read .*run.name="):
        read.open_newest(broken, wanted_all, alone(), heard)
    assert len(heard.named("checkpoint_damaged")) == 2


def test_the_only_one_that_may_be_read_is_damaged(broken: Path) -> None:
    """Islands go on from a round that all hold, so no older one is taken in silence."""
    said = r"up.weight .* hash .*; try: move checkpoints/step-5 away, and go on from"
    with pytest.raises(DamagedStepError, match=said):
        read.open_newest(broken, wanted_all, alone(), Heard(), 5)


def test_the_damaged_one_makes_way_when_the_run_reaches_its_step_again(broken: Path) -> None:
    save_step(broken, 5, keep=1)
    assert verify(broken / "step-5") == []
    assert sorted(os.listdir(broken)) == ["step-5", "step-5.damaged"]


def test_a_file_cut_short_between_opening_and_reading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_shard.os, "preadv", lambda *_: 0)
    manifest = read_manifest(checkpoint)
    with pytest.raises(DamagedFileError, match="was cut short while it was read"):
        read.load(checkpoint, wanted_all(manifest))


def test_a_disk_error_counts_as_damage(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def failing(path: str | Path, flags: int, *more: int) -> int:
        if "step-5/rank" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(stored_shard.os, "open", failing)
    heard = Heard()
    loaded = read.open_newest(two, wanted_all, alone(), heard)
    assert loaded is not None
    assert loaded.step == 4
    assert heard.named("checkpoint_damaged")[0]["reason"] == "cannot be opened: Input/output error"


def test_a_copied_folder_under_another_step_is_refused(two: Path) -> None:
    shutil.copytree(two / "step-4", two / "step-9")
    heard = Heard()
    loaded = read.open_newest(two, wanted_all, alone(), heard)
    assert loaded is not None
    assert loaded.step == 5
    assert (
        "is of step 4, its folder is called step-9"
        in heard.named("checkpoint_damaged")[0]["reason"]
    )
