"""Compressed text files (.gz, .bz2, .xz, .zst), unpacked once into the cache.

    books.txt.gz   12 MB  ──unpack──▶  CACHE/unpacked-KEY/text   40 MB     KEY: name, size, time

Later starts and other ranks read the unpacked file. Its document keeps the name and the time of the
packed one, so that held-out files and token caches are the same on every machine.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

from shoal.base.errors import ConfigError
from shoal.data.files.file_formats import HEAD_BYTES, find_format
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached

SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
"""Suffix of a compressed file → name of its format."""


def is_compressed(path: Path) -> bool:
    """Return whether a file is named as a compressed one, and begins as one."""
    if path.suffix not in SUFFIXES:
        return False
    with path.open("rb", buffering=0) as file:
        known = find_format(file.read(HEAD_BYTES))
    return known is not None and known.name == SUFFIXES[path.suffix]


def unpack(path: Path) -> Path:
    """Return the unpacked file of a compressed one; unpacked now if it is not in the cache.

    Raises:
        ConfigError: the file is damaged, holds another format than text, or nothing here reads
            Zstandard.
    """
    stat = path.stat()

    def build(entry: NewEntry) -> dict[str, Any]:
        made = entry.folder / "text"
        try:
            with _open_packed(path) as packed, made.open("wb") as file:
                shutil.copyfileobj(packed, file, 2**20)
        except (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError) as error:
            raise ConfigError(f"{path}: cannot be unpacked: {error}; try: copy it again") from error
        with made.open("rb") as file:
            inside = find_format(file.read(HEAD_BYTES))
        if inside is not None:
            raise ConfigError(f"{path}: holds {inside.name}, not plain text; try: unpack it before")
        return {"bytes": made.stat().st_size}

    key = content_key(str(path.absolute()), stat.st_size, stat.st_mtime_ns)
    return open_cached("unpacked", key, build)[0] / "text"


def _open_packed(path: Path) -> IO[bytes]:
    """Open a compressed file; bytes that are read from it are unpacked."""
    if path.suffix == ".zst":
        return _open_zstandard(path)
    libraries: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
    return libraries[path.suffix].open(path)


def _open_zstandard(path: Path) -> IO[bytes]:
    """Open a Zstandard file by whichever library is installed."""
    for name in ("compression.zstd", "zstandard", "pyarrow"):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            continue
        if name == "pyarrow":
            opened: IO[bytes] = library.CompressedInputStream(library.OSFile(str(path)), "zstd")
        else:
            opened = library.open(path, "rb")
        return opened
    raise ConfigError(
        f"{path}: Zstandard needs Python 3.14, zstandard or pyarrow; try: pip install zstandard, "
        f"or zstd -d {path}"
    )
