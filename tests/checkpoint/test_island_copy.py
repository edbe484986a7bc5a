"""Copies of another island's checkpoint: equal bytes on the disk, and equal slices sent once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import RECORD, Heard, alone, pieces, state

from shoal.base.errors import CheckpointError
from shoal.checkpoint.format import manifest as manifests
from shoal.checkpoint.format.listing import read_manifest, verify
from shoal.checkpoint.format.manifest import FILE_NAME, StoredFile, StoredSlice, StoredTensor
from shoal.checkpoint.format.safetensors_file import TensorEntry, write_file
from shoal.checkpoint.save.write import save
from shoal.trainer.islands import checkpoint_copy
from shoal.trainer.islands.checkpoint_copy import copy_checkpoint, read_ranges


class Other:
    """Another island's checkpoint, and the bytes that it gave of each file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.given = folder, dict[str, int]()
        self.asked: list[str] = []

    def fetch(self, file: str, ranges: str) -> bytes:
        found = bytearray()
        while True:  # in pieces, as `MemberLinks` does
            answer = read_ranges(self.folder / file, ranges, len(found), 1000)
            if answer is None:
                raise FileNotFoundError(file)
            size, piece = answer
            found += piece
            if len(found) >= size or not piece:
                break
        self.asked.append(f"{file} {ranges}")
        self.given[file] = self.given.get(file, 0) + len(found)
        return bytes(found)


def save_tensors(root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return save(root, 4, pieces(tensors), RECORD, alone(), Heard(), keep=9).path


def copy(source: Path, to: Path) -> Other:
    """Copy a checkpoint; both folders have the same files with the same bytes then."""
    to.mkdir()
    other = Other(source)
    copy_checkpoint(to, other.fetch)
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in to.iterdir())
    for name in names:
        assert (to / name).read_bytes() == (source / name).read_bytes(), name
    assert verify(to) == []
    return other


def merged_state(count: int) -> dict[str, torch.Tensor]:
    """State of an island after a merge, AdamW inside and momentum outside."""
    weights = {f"layer.{k}": torch.randn(50, 20) for k in range(count)}
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        found |= {f"model.{name}": weight, f"outer.{name}": weight.clone()}
        found |= {f"outer.{name}.momentum": torch.randn(50, 20)}
        found |= {f"optimizer.{name}.{part}": torch.randn(50, 20) for part in ("m", "v")}
    return found


def test_weights_that_are_the_merged_ones_come_once(tmp_path: Path) -> None:
    source = save_tensors(tmp_path, merged_state(6))
    other = copy(source, tmp_path / "copy")
    parameters = 6 * 50 * 20
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 20 * parameters
    slices = 16 * parameters
    header = len((source / "rank-0.safetensors").read_bytes()) - 20 * parameters
    assert other.given["rank-0.safetensors"] == slices + header + 8
    assert len(other.asked) == 4, "the manifest, a length, a header, and all slices together"


def test_every_kind_of_tensor_and_a_small_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(save_tensors(tmp_path / "a", state(4)), tmp_path / "one")
    monkeypatch.setattr(checkpoint_copy, "BATCH_BYTES", 9000)
    other = copy(save_tensors(tmp_path / "b", merged_state(6)), tmp_path / "two")
    sizes = [measure_request(text) for text in other.asked]
    assert max(sizes) <= 9000
    assert sum(sizes) > 16 * 6000


def measure_request(text: str) -> int:
    """Bytes of the ranges of a request."""
    pairs = [one.split("-") for one in text.partition(" ")[2].split(",") if one]
    return sum(int(end) - int(begin) for begin, end in pairs)


def save_by_two(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Path:
    """A checkpoint of two ranks."""
    folder.mkdir()
    files, tensors = dict[str, StoredFile](), dict[str, StoredTensor]()
    for rank, held in enumerate((first, second)):
        name = f"rank-{rank}.safetensors"
        entries = [TensorEntry(key, "float32", tuple(t.shape)) for key, t in held.items()]
        done = write_file(
            folder / name,
            entries,
            lambda key, held=held: memoryview(held[key].numpy()).cast("B"),
            {"format": "pt"},
        )
        files[name] = StoredFile(done.size_bytes, done.header_sha256)
        for key, tensor in held.items():
            box = tuple((0, size) for size in tensor.shape)
            piece = StoredSlice(name, key, box, done.sha256[key])
            tensors[key] = StoredTensor(tuple(tensor.shape), "float32", (piece,))
    text = manifests.encode(manifests.Manifest(4, tensors, files))
    (folder / FILE_NAME).write_bytes(text)
    return folder


def test_a_slice_that_another_ranks_file_has_too(tmp_path: Path) -> None:
    weight = torch.randn(100, 10)
    source = save_by_two(
        tmp_path / "step-4", {"outer.w": weight}, {"m": torch.randn(30), "model.w": weight}
    )
    other = copy(source, tmp_path / "copy")
    assert other.given["rank-0.safetensors"] > 4000
    assert other.given["rank-1.safetensors"] < 1000


def test_a_damaged_or_vanished_file_leaves_no_checkpoint(tmp_path: Path) -> None:
    source = save_tensors(tmp_path, merged_state(1))
    manifest = read_manifest(source)
    (name,) = manifest.files
    good = (source / name).read_bytes()
    wrongs = {
        "is not that of": good[:8] + b"x" + good[9:],
        "is too long": (1 << 40).to_bytes(8, "little") + good[8:],
    }
    for why, wrong in wrongs.items():
        (source / name).write_bytes(wrong)
        with pytest.raises(ConnectionError, match=f"header {why}"):
            copy_checkpoint(new_folder(tmp_path), Other(source).fetch)
    (source / name).write_bytes(good[:-100])
    with pytest.raises(ConnectionError, match="bytes came"):
        copy_checkpoint(new_folder(tmp_path), Other(source).fetch)
    (source / FILE_NAME).write_text("{}")
    with pytest.raises(CheckpointError):
        copy_checkpoint(new_folder(tmp_path), Other(source).fetch)
    shutil.rmtree(source)
    with pytest.raises(FileNotFoundError):
        copy_checkpoint(new_folder(tmp_path), Other(source).fetch)


def new_folder(root: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=root))


@pytest.mark.parametrize("ranges", ["x", "3", "-5-9", "1-2-3", "1-2,"])
def test_a_wrong_range_is_no_error_of_the_server(tmp_path: Path, ranges: str) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_ranges(tmp_path / "file", ranges, 0, 100) is None
    assert read_ranges(tmp_path / "none", "0-3", 0, 100) is None


@pytest.mark.parametrize("length", [1, 2, 3, 100])
def test_ranges_come_in_pieces_of_any_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    for ranges, whole in (("2-5,5-5,7-9", b"23478"), ("", b"0123456789"), ("9-20", b"9")):
        found = b""
        while (answer := read_ranges(tmp_path / "file", ranges, len(found), length))[1]:
            found += answer[1]
        assert found == whole
