"""Cache of slow results (tokenizers, tokens) in a folder, made once per content.

    <cache>/<name>-<key>/   meta.json: what was made, and size and CRC-32 of every file beside it
    <cache>/<name>-<key>.lock        one process builds, the others wait and then read
    <cache>/<name>-<key>.checked     files that were verified since the machine started
    <cache>/<name>-<key>.tmp-*       where it is built; renamed when complete, so never seen half

The key is a hash of everything that the content depends on. An entry whose files do not match its
meta.json is made again. Checksums detect files that a crash left half-written. They are verified
once after each start of the machine, and for later writes; otherwise each rank of a run would read
all files. The checksum of an array is computed while it is written, and a new entry counts as
verified. <cache> is $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import cache_folder

VERSION = 1
"""Part of every key; raised when the meaning of an entry changes."""

LOCK_WAIT_S = 600.0
"""Seconds until another process's lock is ignored: two builds are safe, a deadlock is not."""

CHECKED_BYTES = 256 * 2**20
"""Bytes of each file that are verified (0.1 s); beyond them only the size is."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""File with a new text after every start of the machine; without it files are always verified."""


def content_key(*parts: object) -> str:
    """Hash everything that a cache entry depends on, in order, to 24 hex digits.

    Raises:
        TypeError: a part has no JSON form.

    >>> content_key("a", 1) == content_key("a", 1), content_key("a", 1) == content_key("a", 2)
    (True, False)
    """
    text = json.dumps([VERSION, *parts], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class NewEntry:
    """A cache entry under construction: `folder`, empty at first, to write files into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, list[int]] = {}

    def save_array(self, name: str, array: npt.NDArray[Any]) -> Path:
        """Write NAME.npy, compute its checksum on the way, and return its path."""
        path = self.folder / f"{name}.npy"
        with path.open("wb") as file:
            seen = _ChecksumWriter(file)
            np.save(seen, array, allow_pickle=False)
        self._seen[path.name] = [path.stat().st_size, seen.crc]
        return path

    def fingerprints(self) -> dict[str, list[int]]:
        """Return size and CRC-32 of every file; reads those that `save_array` has not written."""
        return {
            p.name: self._seen.get(p.name) or _fingerprint(p) for p in sorted(self.folder.iterdir())
        }


class _ChecksumWriter:
    """A file to write to, which computes the CRC-32 of the first CHECKED_BYTES."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, CHECKED_BYTES
        self.crc = 0

    def write(self, data: bytes) -> int:
        some = memoryview(data)[: self._left]
        self.crc, self._left = zlib.crc32(some, self.crc), self._left - len(some)
        return self._file.write(data)


def open_cached(
    name: str, key: str, build: Callable[[NewEntry], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return an entry's folder and its builder's metadata; build it if missing or damaged.

    Args:
        build: writes files into the folder of the new entry, and returns a JSON object on them.

    Raises:
        ConfigError: the cache is not writable.
    """
    final = cache_folder() / f"{name}-{key}"
    about = _read_entry(final)
    if about is not None:
        return final, about
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(final) as alone:
            about = _read_entry(final)
            if about is None:
                about = _build(final, build, alone)
    except OSError as error:
        raise ConfigError(
            f"data cache {final.parent}: {error.strerror or error}; set SHOAL_CACHE to a folder "
            f"that can be written"
        ) from error
    return final, about


def _build(final: Path, build: Callable[[NewEntry], dict[str, Any]], alone: bool) -> dict[str, Any]:
    if alone:  # what a killed process left
        for stale in final.parent.glob(f"{final.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}.tmp-", dir=final.parent))
    try:
        entry = NewEntry(folder)
        about = build(entry)
        files = entry.fingerprints()
        folder.chmod(0o755)  # a cache may be shared between users
        (folder / "meta.json").write_text(
            json.dumps({"files": files, "about": about}), encoding="utf-8"
        )
        _install_entry(folder, final, files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return about


def _install_entry(folder: Path, final: Path, files: Iterable[str]) -> None:
    """Rename `folder` to its final name; it replaces a damaged entry, not a good one."""
    if final.exists() and _read_entry(final) is None:
        aside = Path(tempfile.mkdtemp(prefix=f"{final.name}.tmp-", dir=final.parent))
        final.rename(aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
    try:
        folder.rename(final)
    except OSError:
        if _read_entry(final) is None:  # else another process was first, with the same content
            raise
    else:
        with suppress(OSError):
            _record_verified(final, _entry_stamp(final, files))


def _record_verified(final: Path, mark: str) -> None:
    """Record that the files of an entry are those of `mark`."""
    if mark:
        final.with_name(f"{final.name}.checked").write_text(mark, encoding="utf-8")


def _fingerprint(path: Path) -> list[int]:
    """Return size and CRC-32 of a file's first CHECKED_BYTES."""
    crc, left = 0, CHECKED_BYTES
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return [path.stat().st_size, crc]


def _read_entry(final: Path) -> dict[str, Any] | None:
    """Return an entry's metadata, or None if it is missing or damaged."""
    try:
        meta = json.loads((final / "meta.json").read_text(encoding="utf-8"))
        mark, checked = _entry_stamp(final, meta["files"]), final.with_name(f"{final.name}.checked")
        if not mark or not checked.is_file() or checked.read_text(encoding="utf-8") != mark:
            if any(_fingerprint(final / n) != list(f) for n, f in meta["files"].items()):
                return None
            with suppress(OSError):  # a cache may be read-only
                _record_verified(final, mark)
        return dict(meta["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entry_stamp(final: Path, names: Iterable[str]) -> str:
    """Return boot id, and size and times of an entry's files; "" if there is no boot id."""
    try:
        boot = BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    stats = {name: (final / name).stat() for name in ("meta.json", *sorted(names))}
    files = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()]
    return json.dumps([boot, files])


@contextmanager
def hold_lock(final: Path) -> Iterator[bool]:
    """Hold a path's lock; yield False if the lock is unavailable, which is slower, not wrong."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield False
        return
    with final.with_name(f"{final.name}.lock").open("w", encoding="utf-8") as file:
        give_up = time.monotonic() + LOCK_WAIT_S
        held = False
        while not held and time.monotonic() < give_up:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield held
