"""Detection of files that are not plain text: by first bytes, or the first byte that is no UTF-8.

    1f 8b 08 …      gzip        try: gzip -dk FILE
    fe ff 00 …      UTF-16      try: iconv -f utf-16 -t utf-8 FILE > NEW
    … e9 …          not UTF-8   byte and line of it; try: iconv -f latin1 -t utf-8 FILE > NEW

`text:`, `jsonl:` and `tokens:` call this before they read a file.
"""

from __future__ import annotations

import codecs
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import ConfigError

HEAD_BYTES = 4096
"""Bytes read from the start of a file."""

LEAST_EVIDENCE = 4
"""Shortest signature in bytes that cannot be the first tokens of a raw file by chance."""


@dataclass(frozen=True)
class FileFormat:
    """A file format, known by its signature at a fixed offset.

    Attributes:
        signature, offset: the bytes, and their offset.
        command: command that unpacks or converts it, with FILE for its path; "" if none.
    """

    name: str
    signature: bytes
    command: str = ""
    offset: int = 0

    def hint(self, path: str) -> str:
        """Return the hint for a user with such a file: a command, or to leave it out."""
        if not self.command:
            return f"leave {Path(path).name} out"
        return self.command.replace("FILE", shlex.quote(path))


FORMATS = (
    FileFormat("gzip", b"\x1f\x8b\x08", "gzip -dk FILE"),
    FileFormat("xz", b"\xfd7zXZ\x00", "xz -dk FILE"),
    FileFormat("bzip2", b"1AY&SY", "bzip2 -dk FILE", 4),
    FileFormat("Zstandard", b"\x28\xb5\x2f\xfd", "zstd -d FILE"),
    FileFormat("LZ4", b"\x04\x22\x4d\x18", "lz4 -d FILE"),
    FileFormat("compress (.Z)", b"\x1f\x9d\x90", "gzip -dk FILE"),
    FileFormat("7-Zip", b"7z\xbc\xaf\x27\x1c", "7z x FILE"),
    FileFormat("RAR", b"Rar!\x1a\x07", "unrar x FILE"),
    FileFormat("tar", b"ustar", "tar -xf FILE", 257),
    FileFormat("PDF", b"%PDF-", "pdftotext FILE NEW"),
    FileFormat("SQLite", b"SQLite format 3\x00"),
    FileFormat("JPEG", b"\xff\xd8\xff"),
    FileFormat("PNG", b"\x89PNG\r\n\x1a\n"),
    FileFormat("GIF", b"GIF8"),
    FileFormat("parquet", b"PAR1"),
    FileFormat("Arrow", b"ARROW1\x00\x00"),
    FileFormat("NumPy .npy", b"\x93NUMPY"),
    FileFormat("HDF5", b"\x89HDF\r\n\x1a\n"),
    FileFormat("ELF", b"\x7fELF"),
    FileFormat("Word .doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "soffice --convert-to txt FILE"),
    FileFormat("UTF-32", b"\xff\xfe\x00\x00", "iconv -f utf-32 -t utf-8 FILE > NEW"),
    FileFormat("UTF-32", b"\x00\x00\xfe\xff", "iconv -f utf-32 -t utf-8 FILE > NEW"),
    FileFormat("UTF-16", b"\xff\xfe", "iconv -f utf-16 -t utf-8 FILE > NEW"),
    FileFormat("UTF-16", b"\xfe\xff", "iconv -f utf-16 -t utf-8 FILE > NEW"),
)
"""Known formats, longer signatures before their own prefixes."""

ZIPPED = {
    b"word/": FileFormat("Word .docx", b"", "pandoc FILE -t plain -o NEW"),
    b"xl/": FileFormat("Excel .xlsx", b""),
    b"ppt/": FileFormat("PowerPoint .pptx", b""),
    b"mimetypeapplication/epub": FileFormat("EPUB", b"", "pandoc FILE -t plain -o NEW"),
    b"mimetypeapplication/vnd.oasis": FileFormat(
        "OpenDocument", b"", "pandoc FILE -t plain -o NEW"
    ),
    b"/data.pkl": FileFormat("torch.save", b""),
    b"[Content_Types].xml": FileFormat("an Office document", b"", "soffice --convert-to txt FILE"),
}
"""Formats that are a zip archive, by a file name near its start."""

ZIP = FileFormat("zip", b"PK\x03\x04", "unzip FILE")


def find_format(head: bytes, least: int = 0) -> FileFormat | None:
    """Return the format of a file's first bytes; None if it is not known.

    Args:
        head: the first HEAD_BYTES of a file, or fewer.
        least: shortest signature that counts, in bytes.

    >>> find_format(bytes.fromhex("1f8b0800")).name, find_format(b"plain text")
    ('gzip', None)
    """
    if head.startswith(ZIP.signature):
        inside = [kind for name, kind in ZIPPED.items() if name in head]
        return inside[0] if inside else ZIP
    for known in FORMATS:
        if len(known.signature) >= least and head.startswith(known.signature, known.offset):
            return known
    return None


ASCII_PDF = re.compile(rb"%PDF-\d\.\d")
"""The one known format that may be valid text to its last byte, and still is no plain text."""


def decode_text(path: str, read: bytes) -> str:
    """Return the content of a UTF-8 text file, without its byte order mark.

    Raises:
        ConfigError: the file has another format, a NUL, or a byte that is not UTF-8; names byte
            and line.
    """
    try:
        text = read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + (len(codecs.BOM_UTF8) if read.startswith(codecs.BOM_UTF8) else 0)
        raise ConfigError(_no_text(path, read, at)) from None
    if "\0" in text:
        raise ConfigError(_no_text(path, read, read.index(b"\0")))
    if ASCII_PDF.match(read) and b"endobj" in read:
        raise ConfigError(_no_text(path, read, 0))
    return text


def _no_text(path: str, read: bytes, at: int) -> str:
    """Format the error for a file that is no plain text, from the byte `at` on."""
    known = find_format(read[:HEAD_BYTES])
    if known is not None:
        return f"{path}: is {known.name}, not plain text; try: {known.hint(path)}"
    name, line = shlex.quote(path), read.count(b"\n", 0, at) + 1
    found = f"{path}: byte {at} (line {line}) is 0x{read[at]:02x}"
    if read[at] == 0:
        return f"{found}, {_zeros(read, name)}"
    kept = read.decode("utf-8", errors="ignore")
    bad = len(read) - len(kept.encode())
    others = sum(not one.isascii() for one in kept.removeprefix("\ufeff"))
    if at + bad == len(read) and others and 0xC2 <= read[at] <= 0xF4:
        return f"{found}: the file ends within a character; try: copy it again"
    if bad > 0.3 * len(read):
        own = f"iconv -f ENCODING -t utf-8 {name} > NEW, or leave it out if it is no text"
        return f"{found}, which is not UTF-8; try: {own}"
    hint = f"iconv -f latin1 -t utf-8 {name} > NEW"
    if others > bad:  # UTF-8 that was damaged
        hint = f"iconv -c -f utf-8 -t utf-8 {name} > NEW, which leaves such bytes out"
    return f"{found}, which is not UTF-8 ({bad} such byte{'s' * (bad > 1)}); try: {hint}"


def _zeros(read: bytes, name: str) -> str:
    """Return the source of zeros in a file: ASCII in 16 bits, else no text at all."""
    shares = [read[side::2].count(0) * 2 / len(read) for side in (0, 1)]
    if max(shares) > 0.3 and min(shares) < 0.1:
        kind = "utf-16le" if shares[1] > shares[0] else "utf-16be"
        return f"as in UTF-16 without a byte order mark; try: iconv -f {kind} -t utf-8 {name} > NEW"
    return f"which no plain text has; try: tr -d '\\000' < {name} > NEW, or leave it out"
