"""Documents: the files from which text is read, their texts and held-out parts.

A document has one text, its file's; text_rows.py has files with many. A file that a user names must
be UTF-8; a few of Python's own sources are not, by a coding line (PEP 263), and are read anyway.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

from shoal.base.errors import ConfigError
from shoal.config.paths import fixed_folder, glob_files
from shoal.data.files.compressed_text import is_compressed, unpack
from shoal.data.files.file_formats import decode_text

EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3",
    "__pycache__",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One file of text; `name` is its path below the source's folder, the same on every machine."""

    name: str
    path: str
    size_bytes: int
    modified_ns: int

    def text(self) -> str:
        """Return the whole file; bytes that are not UTF-8 become U+FFFD. May raise ConfigError."""
        try:
            return Path(self.path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error

    def texts(self) -> Iterator[str]:
        """Yield the texts in the file: one; raises as `text`."""
        yield self.text()

    def sample_texts(self, texts: Iterable[str], share: float) -> Iterator[str]:
        """Yield the head of each of the file's texts: `share` of its characters."""
        return (text[: round(len(text) * share)] for text in texts)

    def read_range(self, start: int, stop: int) -> str:
        """Return the characters that lie whole in bytes start … stop − 1; raises as `text`."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                read = file.read(stop - start)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
        return read.decode("utf-8", errors="ignore").replace("\r\n", "\n")

    def recipe(self) -> list[Any]:
        """Return the settings that its texts depend on, as JSON values."""
        return [self.name, self.size_bytes, self.modified_ns]

    @property
    def is_split(self) -> bool:
        """True if other texts of the file are on the other side of the split (see `sides`)."""
        return False

    def iter_split(self) -> Iterator[tuple[bool, str]]:
        """Yield (whether it is held out, text) of all texts of the file."""
        raise NotImplementedError

    def unsplit(self) -> Document:
        """Return the document with all texts of its file, if it is one side of a split."""
        return self

    @classmethod
    def of(cls, path: Path, folder: Path, **more: Any) -> Self:
        """Create the document of a file below `folder`; `more`: further fields of a subclass."""
        stat = path.stat()
        name = path.relative_to(folder).as_posix()
        return cls(name, str(path), stat.st_size, stat.st_mtime_ns, **more)


@dataclass(frozen=True)
class TextFile(Document):
    """A file of text that a user named: UTF-8, else it is refused.

    Attributes:
        packed: the compressed file that the user named, if `path` is what it holds.
    """

    packed: str = ""

    def text(self) -> str:
        """Return the whole file, without a byte order mark, its line ends as one newline.

        Raises:
            ConfigError: the file cannot be read, is of another format, or has a byte that is no
                text; names the place.
        """
        try:
            read = Path(self.path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
        return decode_text(self.packed or self.path, read).replace("\r\n", "\n").replace("\r", "\n")

    def recipe(self) -> list[Any]:
        """Return the settings that its texts depend on, as JSON values."""
        return [*super().recipe(), "utf-8"]  # 0.1.0 kept U+FFFD in the place of other bytes


def stdlib_documents() -> list[Document]:
    """Return the standard library's own .py files, without tests; about 600 files, 10 MiB.

    Raises a ConfigError if Python has no source files (some embedded builds).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    documents = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in EXCLUDED_FOLDERS)
        paths = [Path(here, f) for f in sorted(files) if f.endswith(".py")]
        documents += [Document.of(p, folder) for p in paths if p.is_file()]
    if not documents:
        raise ConfigError(f"data.source = stdlib: no .py files in {folder}; try: text:GLOB")
    return documents


def glob_documents(pattern: str, where: str = "data.source") -> list[TextFile]:
    """Return the files of `text:GLOB`; ConfigError if there are none, with the nearest path.

    Compressed files are unpacked into the cache, once.
    """
    folder = fixed_folder(pattern)
    return [_unpacked(TextFile.of(p, folder), p) for p in glob_files(pattern, where)]


def _unpacked(document: TextFile, path: Path) -> TextFile:
    if not is_compressed(path):
        return document
    made = unpack(path)
    return replace(document, path=str(made), packed=str(path), size_bytes=made.stat().st_size)


def hash_fraction(text: str) -> float:
    """Return a text's hash as a number between 0 and 1: below a share it is held out."""
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split documents into training and validation, by a hash of each name.

    A new file moves no other. Each side has at least one document if there are two and share is
    above 0; a lone document stays whole here (its tail is held out, see open_corpus).
    """
    if share <= 0 or len(documents) < 2:
        return list(documents), []

    ranked = sorted(documents, key=lambda document: hash_fraction(document.name))
    count = sum(hash_fraction(d.name) < share for d in documents)
    held = {d.name for d in ranked[: min(max(1, count), len(documents) - 1)]}
    return [d for d in documents if d.name not in held], [d for d in documents if d.name in held]


D = TypeVar("D", bound=Document)


def spread_ranges(documents: Sequence[D], count: int, wanted: int) -> list[tuple[D, int, int]]:
    """Return (document, start, stop) of ranges spread evenly over the bytes of all documents.

    Args:
        count: number of places.
        wanted: bytes of all places together.

    Returns:
        the places in order; a place across several files becomes one in each.
    """
    ends = list(accumulate(document.size_bytes for document in documents))
    found = []
    for number in range(count):
        start = (2 * number + 1) * ends[-1] // (2 * count) - wanted // count // 2
        stop = start + wanted // count
        at = bisect_right(ends, start)
        while at < len(documents) and start < stop:
            front = ends[at] - documents[at].size_bytes
            if start < ends[at]:
                found.append((documents[at], start - front, min(stop, ends[at]) - front))
            start, at = max(start, ends[at]), at + 1
    return found
