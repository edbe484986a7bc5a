"""`text:` and `jsonl:` read UTF-8 alone: other files are refused by name, bad bytes by place."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.data.files import compressed_text
from shoal.data.files.documents import glob_documents, stdlib_documents
from shoal.data.files.row_files import read_objects
from shoal.data.sources import open_data

LINE = "Größer als ein naïve café 😀 � ok.\n"
TEXT = LINE * 60


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, TEXT)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        about = tarfile.TarInfo("a.txt")
        about.size = len(TEXT.encode())
        archive.addfile(about, io.BytesIO(TEXT.encode()))
    return file.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "some.db") as connection:
        connection.execute("create table rows (text)")
    connection.close()
    return (folder / "some.db").read_bytes()


PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF\n"
REFUSED = {
    "gzip": (gzip.compress(TEXT.encode()), "is gzip, not plain text; try: gzip -dk {}"),
    "xz": (lzma.compress(TEXT.encode()), "is xz, not plain text; try: xz -dk {}"),
    "bzip2": (bz2.compress(TEXT.encode()), "is bzip2, not plain text; try: bzip2 -dk {}"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(99), "is Zstandard, not plain text; try: zstd -d {}"),
    "zip": (zipped("a.txt"), "is zip, not plain text; try: unzip {}"),
    "docx": (zipped("[Content_Types].xml", "word/document.xml"), "is Word .docx, not plain text"),
    "tar": (tarred(), "is tar, not plain text; try: tar -xf {}"),
    "pdf": (PDF, "is PDF, not plain text; try: pdftotext {} NEW"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(99), "is JPEG, not plain text; try: leave bad.txt out"),
    "utf-16": (TEXT.encode("utf-16"),
               "is UTF-16, not plain text; try: iconv -f utf-16 -t utf-8 {} > NEW"),
    "utf-32": (TEXT.encode("utf-32"), "is UTF-32, not plain text"),
    "utf-16 without mark": ("plain words\n".encode("utf-16-le") * 9,
        "byte 1 (line 1) is 0x00, as in UTF-16 without a byte order mark; try: iconv -f utf-16le"),
    "latin1": ("one line\nnaïve café\n".encode("latin-1"),
        "byte 11 (line 2) is 0xef, which is not UTF-8 (2 such bytes); try: iconv -f latin1 -t utf-8"),
    "latin1 at the end": ("un café".encode("latin-1"),
        "byte 6 (line 1) is 0xe9, which is not UTF-8 (1 such byte); try: iconv -f latin1"),
    "gbk": ("中文文本" .encode("gbk") * 30, "is not UTF-8; try: iconv -f ENCODING -t utf-8 {}"),
    "cut": (TEXT.encode()[:-5] + "é".encode()[:1], "is 0xc3: the file ends within a character"),
    "nul": (b"ab\ncd\x00ef\n" * 9, "byte 5 (line 2) is 0x00, which no plain text has; try: tr -d"),
    "mark, then a bad byte": (b"\xef\xbb\xbfabc\n\xff", "byte 7 (line 2) is 0xff"),
    "one bad byte": (LINE.encode() * 130_000 + b"\xff" + LINE.encode() * 130_000,
        "byte 5590000 (line 130001) is 0xff, which is not UTF-8 (1 such byte); try: iconv -c -f"),
}  # fmt: skip
SHORT = ("gzip", "utf-16", "latin1", "nul", "one bad byte")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.proof("faults")]) for n in REFUSED]
)  # fmt: skip
def test_what_is_no_utf8_is_refused_by_name_or_place(tmp_path: Path, name: str) -> None:
    read, text = REFUSED[name]
    path = tmp_path / "bad.txt"
    path.write_bytes(read)
    (tmp_path / "good.txt").write_text(TEXT)
    with pytest.raises(ConfigError) as caught:
        open_data(f"text:{tmp_path}/*.txt", tokenizer="bpe:300", sequence=8)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert text.format(path) in said
    assert "\n" not in said
    assert "; try: " in said


def test_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(database(tmp_path))
    (document,) = glob_documents(f"{tmp_path}/*.txt")
    with pytest.raises(ConfigError, match=r"bad.txt: is SQLite, not plain text; try: leave"):
        document.text()


RIGHT = {
    "as it stands": (TEXT.encode(), TEXT),
    "crlf": (TEXT.replace("\n", "\r\n").encode(), TEXT),
    "cr": (b"a\rb\r", "a\nb\n"),
    "mark": (b"\xef\xbb\xbf" + TEXT.encode(), TEXT),
    "empty": (b"", ""),
    "words of formats": (b"GIF8 and PAR1 begin files; %PDF-1.4 does\n", None),
    "pdf in words": (b"%PDF-1.4 is how they begin\n", None),
    "cut nowhere": ("é".encode(), "é"),
    "controls": ("\x0c\x1b[0m\x7f\x85\n".encode(), "\x0c\x1b[0m\x7f\x85\n"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_text_stays_as_it_is(tmp_path: Path, name: str) -> None:
    """As 0.1.0 read it, to the character; a byte order mark alone is dropped."""
    read, text = RIGHT[name]
    (tmp_path / "a.txt").write_bytes(read)
    (document,) = glob_documents(f"{tmp_path}/*.txt")
    assert document.text() == (read.decode() if text is None else text)
    plain = (tmp_path / "a.txt").read_text(encoding="utf-8", errors="replace")
    assert document.text() == plain.removeprefix("\ufeff")


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_compressed_text_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The tokens, and the held-out files, are those of the plain text under the packed name."""
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix]
    for name in "abc":
        (tmp_path / f"{name}.txt.{suffix}").write_bytes(pack((TEXT * 9 + name).encode()))
    (tmp_path / f"d.{suffix}").write_text(TEXT, encoding="utf-8")  # named so, and plain
    first = glob_documents(f"{tmp_path}/*.{suffix}")
    assert [one.text() for one in first] == [*(TEXT * 9 + name for name in "abc"), TEXT]
    assert [one.name for one in first] == [
        *(f"{name}.txt.{suffix}" for name in "abc"),
        f"d.{suffix}",
    ]
    assert first[0].size_bytes == len((TEXT * 9 + "a").encode())
    with monkeypatch.context() as again:
        again.setattr(compressed_text, "_open_packed", lambda path: pytest.fail("read again"))
        assert [one.path for one in glob_documents(f"{tmp_path}/*.{suffix}")] == [
            one.path for one in first
        ]
    data = open_data(f"text:{tmp_path}/*.{suffix}", tokenizer="bpe:300", sequence=4)
    assert len(data.train)


@pytest.mark.parametrize(
    ("name", "read", "told"),
    [
        ("a.txt.gz", gzip.compress(TEXT.encode() * 99)[:-20], "cannot be unpacked: "),
        ("a.tar.xz", lzma.compress(tarred()), "holds tar, not plain text; try: unpack it before"),
        (
            "a.gz",
            gzip.compress(b"good\nbad \xff"),
            "a.gz: byte 9 (line 2) is 0xff, which is not UTF",
        ),
        ("a.zst", b"\x28\xb5\x2f\xfd" + bytes(99), "a.zst"),
    ],
    ids=["cut", "tar", "no text", "zst"],
)
def test_compressed_files_without_text_are_named(
    tmp_path: Path, name: str, read: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(read)
    with pytest.raises(ConfigError) as error:
        open_data(f"text:{tmp_path}/*", tokenizer="bpe:300", sequence=2, validation=0)
    assert told in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_a_cache_of_an_earlier_version_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 kept the tokens of a packed file under its name, size and time."""
    from shoal.data.files.documents import Document, TextFile

    (tmp_path / "a.txt").write_bytes(gzip.compress(TEXT.encode()))
    with monkeypatch.context() as earlier:
        earlier.setattr(TextFile, "text", Document.text)
        earlier.setattr(TextFile, "recipe", Document.recipe)
        open_data(f"text:{tmp_path}/*.txt", tokenizer="bpe:300", sequence=2, validation=0)
    with pytest.raises(ConfigError, match="is gzip"):
        open_data(f"text:{tmp_path}/*.txt", tokenizer="bpe:300", sequence=2, validation=0)


def test_pythons_own_sources_may_have_another_encoding(tmp_path: Path) -> None:
    """The default source is read as ever: U+FFFD in the place of other bytes."""
    documents = stdlib_documents()
    assert {type(one).__name__ for one in documents} == {"Document"}
    (tmp_path / "old.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    old = documents[0].of(tmp_path / "old.py", tmp_path)
    assert old.text() == "# -*- coding: latin-1 -*-\n# �\n"
    assert old.recipe() == [old.name, old.size_bytes, old.modified_ns]


ROW = b'{"text": "one row"}\n'


@pytest.mark.parametrize(
    ("name", "read", "text"),
    [
        ("a.jsonl", gzip.compress(ROW), r"a.jsonl: is gzip, not JSON lines; try: mv .*a.jsonl .*a.jsonl.gz"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd" + bytes(99), "a.jsonl: is Zstandard, not JSON lines; try: zstd -d"),
        ("a.jsonl", ROW.decode().encode("utf-16"), "a.jsonl: is UTF-16, not JSON lines; try: iconv"),
        ("a.jsonl", ROW + ROW.replace(b"one", b"\xe9"), "a.jsonl:2: is not JSON"),
    ],
)  # fmt: skip
def test_json_lines_name_what_a_file_is(tmp_path: Path, name: str, read: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(read)
    with pytest.raises(ConfigError, match=text):
        list(read_objects(str(tmp_path / name)))


def test_json_lines_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + ROW * 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + ROW * 2))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert [row for _, row in read_objects(str(tmp_path / name))] == [{"text": "one row"}] * 2
