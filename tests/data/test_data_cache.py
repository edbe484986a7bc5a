"""The cache: made once, shared, rebuilt when damaged, never seen half-made."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import cache_folder
from shoal.data.files import tokenizer_cache
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


class Builder:
    """Counts how often it had to build."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, entry: NewEntry) -> dict[str, Any]:
        self.built += 1
        (entry.folder / "data.bin").write_bytes(bytes(range(200)))
        return {"answer": 42}


def test_made_once() -> None:
    build = Builder()
    first = open_cached("thing", "k1", build)
    assert open_cached("thing", "k1", build) == first
    assert build.built == 1
    folder, about = first
    assert about == {"answer": 42}
    assert (folder / "data.bin").read_bytes() == bytes(range(200))
    open_cached("thing", "k2", build)
    assert build.built == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "meta", "meta-list"])
def test_damage_is_found_and_mended(damage: str) -> None:
    build = Builder()
    folder, _ = open_cached("thing", "k", build)
    data, meta = folder / "data.bin", folder / "meta.json"
    if damage == "flip":
        data.write_bytes(bytes(range(199)) + b"\x00")
    elif damage == "cut":
        data.write_bytes(b"")
    elif damage == "remove":
        data.unlink()
    else:
        meta.write_text("{" if damage == "meta" else "[]")
    again, about = open_cached("thing", "k", build)
    assert (build.built, again, about) == (2, folder, {"answer": 42})
    assert data.read_bytes() == bytes(range(200))
    names = sorted(p.name for p in folder.parent.iterdir())
    assert names == ["thing-k", "thing-k.checked", "thing-k.lock"]


def test_files_are_verified_once_after_a_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, read = Builder(), []
    real = tokenizer_cache._fingerprint
    monkeypatch.setattr(
        tokenizer_cache, "_fingerprint", lambda path: read.append(path.name) or real(path)
    )
    folder, _ = open_cached("thing", "k", build)
    read.clear()
    for _ in range(3):
        open_cached("thing", "k", build)
    assert read == [], "it was just made"
    monkeypatch.setattr(tokenizer_cache, "BOOT", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another start")
    for _ in range(2):
        open_cached("thing", "k", build)
    assert read == ["data.bin"]
    kept = (folder / "data.bin").stat()
    (folder / "data.bin").write_bytes(bytes(200))
    os.utime(folder / "data.bin", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    open_cached("thing", "k", build)
    assert build.built == 2, "as large and as old as before, and still found"
    (tmp_path / "boot_id").unlink()
    read.clear()
    for _ in range(2):
        open_cached("thing", "k", build)
    assert read == ["data.bin"] * 2, "where starts are not told"


def test_a_builder_that_fails_leaves_nothing() -> None:
    def fail(entry: NewEntry) -> dict[str, Any]:
        (entry.folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        open_cached("thing", "k", fail)
    assert [p.name for p in cache_folder().iterdir()] == ["thing-k.lock"]


def test_what_a_killed_process_left_is_removed() -> None:
    stale = cache_folder() / "thing-k.tmp-abc"
    stale.mkdir(parents=True)
    open_cached("thing", "k", Builder())
    assert not stale.exists()


def test_without_a_lock_the_first_of_two_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on a file system without locks build at once; both must end up well."""
    monkeypatch.setattr(tokenizer_cache, "LOCK_WAIT_S", 0.0)
    inner = Builder()

    def build(entry: NewEntry) -> dict[str, Any]:
        open_cached("thing", "k", inner)  # the other process finishes first
        return Builder()(entry)

    folder, about = open_cached("thing", "k", build)
    assert about == {"answer": 42}
    assert (folder / "data.bin").exists()
    assert inner.built == 1


def race(log: Path) -> None:
    """One of two processes that want the same entry."""

    def build(entry: NewEntry) -> dict[str, Any]:
        with log.open("a") as file:
            file.write("built ")
        time.sleep(0.3)
        return Builder()(entry)

    folder, _ = open_cached("race", "k", build)
    assert (folder / "data.bin").stat().st_size == 200
    with log.open("a") as file:
        file.write("read ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the racers are forked")
def test_two_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=race, args=(tmp_path / "log",)) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(timeout=60)
        assert racer.exitcode == 0
    assert (tmp_path / "log").read_text() == "built read read "


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="cache: Not a directory; set SHOAL_CACHE to a folder"):
        open_cached("thing", "k", Builder())


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/shoal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "shoal"


def test_the_key_tells_parts_apart() -> None:
    keys = {content_key("ab", "c"), content_key("a", "bc"), content_key(["ab", "c"])}
    assert len(keys) == 3
