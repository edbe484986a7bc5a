"""What stays in a remote folder, and what stays here while it is copied: one process, in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoint_cases import alone, save_step

from shoal.checkpoint.format.listing import list_checkpoints
from shoal.checkpoint.remote.remote_folder import RemoteFolder
from shoal.checkpoint.remote.upload import CheckpointUploader, start_uploads


@pytest.fixture
def store() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/far"):
        memory.rm("/far", recursive=True)


def test_what_stays_there_is_what_stays_here(store: Any, tmp_path: Path) -> None:
    remote, root = RemoteFolder("memory://far"), tmp_path / "checkpoints"
    for step in (1, 2, 3, 7):
        remote.upload_checkpoint(save_step(root, step).path, "", keep=2)
    assert remote.steps() == [7, 3]
    other = save_step(tmp_path / "again" / "checkpoints", 3, aliases={"model.tie": "model.mask"})
    store.pipe("/far/checkpoints/step-5/rank-0.safetensors", b"half")  # its manifest never came
    remote.upload_checkpoint(other.path, "", keep=2)
    assert remote.steps() == [7, 3]  # later ones are not touched
    assert not store.exists("/far/checkpoints/step-5")
    assert remote.read_manifest("", 3)[1] == (other.path / "manifest.json").read_bytes()
    remote.upload_checkpoint(save_step(root, 4).path, "", keep=1)
    assert remote.steps() == [7, 4]


def test_a_tag_has_one_and_hub_comes_along(store: Any, tmp_path: Path) -> None:
    remote, best = RemoteFolder("memory://far"), tmp_path / "tags" / "best"
    for step in (5, 3):
        path = save_step(best / "checkpoints", step).path
        (best / "hub").mkdir(exist_ok=True)
        (best / "hub" / "config.json").write_text(str(step))
        remote.upload_checkpoint(path, "tags/best/", keep=1)
        assert remote.steps("tags/best/") == [step]
        assert store.cat_file("/far/tags/best/hub/config.json") == str(step).encode()
    assert remote.steps() == []


def test_a_checkpoint_stays_while_it_is_copied(store: Any, tmp_path: Path) -> None:
    """Saves go on meanwhile; what was deleted before its turn is skipped without a word."""
    root, lines = tmp_path / "checkpoints", list[str]()
    goes_on, began = threading.Event(), threading.Event()

    class Slow(RemoteFolder):
        def _put_files(self, *arguments: Any) -> None:
            began.set()
            assert goes_on.wait(20)
            super()._put_files(*arguments)

    uploader = CheckpointUploader(tmp_path, Slow("memory://far"), 2, lines.append)

    def saved(step: int) -> None:
        path = save_step(root, step, keep=1).path
        uploader.handle_event({"event": "checkpoint_saved", "folder": str(path)})

    saved(1)
    assert began.wait(20)
    for step in (2, 3):
        saved(step)
        assert [found.step for found in list_checkpoints(root)] == [step, 1]
    goes_on.set()
    assert uploader.ended(20)
    assert RemoteFolder("memory://far").steps() == [3, 1]
    save_step(root, 4, keep=1)
    assert [found.step for found in list_checkpoints(root)] == [4]
    uploader = CheckpointUploader(tmp_path, Slow("memory://far"), 2, lines.append)
    uploader.handle_event({"event": "checkpoint_saved", "folder": str(root / "step-3")})
    assert uploader.ended(20)
    assert lines == ["checkpoint.remote = memory://far: has checkpoints/step-3"]


def test_a_run_waits_for_the_last_copy_but_not_for_ever(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, hooks, goes_on = list[str](), list[Any](), threading.Event()
    monkeypatch.setattr("shoal.checkpoint.remote.upload.HEARD_S", 0.05)
    monkeypatch.setattr("shoal.checkpoint.remote.upload.DEADLINE_S", 0.2)
    monkeypatch.setattr(RemoteFolder, "_put_files", lambda *_: goes_on.wait(20))
    finish = start_uploads(tmp_path, "memory://far", 2, alone(), hooks.append, lines.append)
    path = save_step(tmp_path / "checkpoints", 1).path
    hooks[0]({"event": "checkpoint_saved", "folder": str(path)})
    finish()
    start = "checkpoint.remote = memory://far: "
    assert lines == [f"{start}is still written to", f"{start}is given up"]
    goes_on.set()
    assert hooks[0].__self__.ended(20)


def test_what_failed_is_tried_again_beside_the_next(store: Any, tmp_path: Path) -> None:
    lines, hooks = list[str](), list[Any]()
    finish = start_uploads(tmp_path, "memory://far", 2, alone(), hooks.append, lines.append)
    tag = save_step(tmp_path / "tags" / "best" / "checkpoints", 1).path
    manifest = (tag / "manifest.json").read_bytes()
    (tag / "manifest.json").write_bytes(b"{}")
    hooks[0]({"event": "checkpoint_saved", "folder": str(tag)})
    while hooks[0].__self__._running is not None:
        pass
    hooks[0]({"event": "step"})
    said = "checkpoints/step-1/manifest.json: is not a Shoal manifest; checkpoints/step-1 was not copied there"
    assert lines == [said]
    (tag / "manifest.json").write_bytes(manifest)
    path = save_step(tmp_path / "checkpoints", 2).path
    hooks[0]({"event": "resumed", "folder": str(path)})
    hooks[0]({"event": "resumed", "folder": str(tmp_path.parent / "other" / "checkpoints" / "x")})
    finish()
    remote = RemoteFolder("memory://far")
    assert (remote.steps(), remote.steps("tags/best/")) == ([2], [1])
    assert lines[1:] in (
        [f"checkpoint.remote = memory://far: has checkpoints/step-{n}"] for n in (1, 2)
    )
