"""A full disk: the save fails with its reason, the old checkpoint stays, a later save works."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Heard, alone, assert_same, pieces, save_step, state, wanted_all

from shoal.base.errors import CheckpointError
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.checkpoint.load import read
from shoal.checkpoint.save import write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root with CAP_SYS_ADMIN")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=20)


def _big(step: int) -> list[write.Piece]:
    return pieces({"w": torch.full((768, 512), float(step))})  # 1.5 MiB


def _save_big(root: Path, step: int, heard: Heard) -> write.SavedCheckpoint:
    return write.save(root, step, _big(step), {}, alone(), heard, keep=1)


def test_too_little_space_is_seen_before_writing(small_disk: Path) -> None:
    root, heard = small_disk / "checkpoints", Heard()
    save_step(root, 1)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    text = r"step-2 was not saved: it needs 1.5 MiB, \d+.\d KiB are free on this disk; older"
    with pytest.raises(CheckpointError, match=text):
        _save_big(root, 2, heard)
    assert os.listdir(root) == ["step-1"]
    loaded = read.open_newest(root, wanted_all, alone(), heard)
    assert loaded is not None
    assert_same(loaded.tensors, state(1))
    ballast.unlink()
    _save_big(root, 3, heard)
    assert [name for name, _ in heard.events] == ["checkpoint_failed", "checkpoint_saved"]
    assert [found.step for found in list_checkpoints(root)] == [3]


def test_a_disk_that_fills_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, heard = small_disk / "checkpoints", Heard()
    save_step(root, 1)
    (small_disk / "ballast").write_bytes(bytes(1 << 20))
    # Somebody else takes the space after the check.
    monkeypatch.setattr(folders, "check_space", lambda *_: None)
    text = r"tmp-\w+/rank-0.safetensors: No space left on device; older checkpoints are as they"
    with pytest.raises(CheckpointError, match=text):
        _save_big(root, 2, heard)
    assert os.listdir(root) == ["step-1"]
    (failed,) = heard.named("checkpoint_failed")
    assert failed["rank"] == 0
    assert "No space left" in failed["reason"]
    assert failed["step"] == 2
    assert read.open_newest(root, wanted_all, alone(), heard) is not None


def test_a_file_size_limit_is_a_failed_save_too(tmp_path: Path) -> None:
    root, heard = tmp_path / "checkpoints", Heard()
    save_step(root, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank-0.safetensors: File too large"):
            _save_big(root, 2, heard)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(root) == ["step-1"]
    assert not _save_big(root, 2, heard).existed


def test_old_checkpoints_that_cannot_go_are_only_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, heard = tmp_path / "checkpoints", Heard()
    save_step(root, 1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    _save_big(root, 2, heard)
    (notice,) = heard.named("notice")
    assert "old checkpoints stay: Permission denied" in notice["text"]
    assert [found.step for found in list_checkpoints(root)] == [2]
