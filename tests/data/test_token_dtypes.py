"""Raw files of tokens that were written with another dtype are refused; right ones are not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shoal.base.errors import ConfigError
from shoal.config.paths import check_data
from shoal.config.sections import DataSection
from shoal.data.files.token_dtypes import check_dtype, detect_dtype
from shoal.data.files.token_files import open_folder
from shoal.data.files.tokenizer_cache import content_key
from shoal.data.sources import open_data

Ids = npt.NDArray[np.int64]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.mkdir()
    return path


def zipf(vocabulary: int, count: int, power: float = 1.1) -> Ids:
    """Ids as frequent as words are, the frequent ones first, as tokenizers number them."""
    weights = 1 / np.arange(1, vocabulary + 1) ** power
    draws = np.random.default_rng(vocabulary + count)
    return draws.choice(vocabulary, size=count, p=weights / weights.sum())


def permuted(vocabulary: int, count: int) -> Ids:
    """The same with ids that say nothing of frequency."""
    return np.random.default_rng(1).permutation(vocabulary)[zipf(vocabulary, count)]


def characters() -> Ids:
    """Real text, a character a token, numbered from 0."""
    read = np.frombuffer(Path(os.__file__).read_bytes(), dtype=np.uint8)
    return np.unique(read, return_inverse=True)[1].ravel()


def padded(ids: Ids, real: int = 20, length: int = 128, pad: int = 0) -> Ids:
    """Rows of `length` tokens, of which `real` are not padding."""
    rows = np.full((len(ids) // real, length), pad)
    rows[:, :real] = ids[: len(rows) * real].reshape(-1, real)
    return rows.ravel()


def equations(first: int, below: int, operators: tuple[int, int, int]) -> Ids:
    """Rows a + b = c ; of which every second token is an operator: two of three are alike at most."""
    rows = np.random.default_rng(2).integers(first, below, (3000, 6))
    rows[:, 1::2] = operators
    return rows.ravel()


NARROW: dict[str, Ids] = {
    "words": zipf(50257, 20_000),
    "few words": zipf(50257, 60),
    "a full vocabulary": zipf(65536, 20_000),
    "ids in no order": permuted(50257, 20_000),
    "every id alike": np.random.default_rng(3).integers(0, 65536, 20_000),
    "small vocabulary": zipf(300, 5000),
    "characters": characters(),
    "100 characters": characters()[:100],
    "bits": np.random.default_rng(4).integers(0, 2, 5000),
    "zeros": np.zeros(5000, dtype=np.int64),
    "many zeros": zipf(50257, 20_000) * (np.random.default_rng(5).random(20_000) < 0.03),
    "padded": padded(zipf(50257, 10_000)),
    "padded by the last id": padded(zipf(50257, 10_000), pad=50256),
    "rows of odd length": padded(zipf(50257, 10_000), real=21, length=127),
    "one text, then zeros": np.append(zipf(50257, 300), np.zeros(20_000, dtype=np.int64)),
    "sorted": np.sort(zipf(50257, 20_000)),
    "counting": np.arange(1000),
    "equations, operators last": equations(0, 97, (97, 98, 99)),
    "equations, operators first": equations(3, 100, (0, 1, 2)),
    "equations of large numbers": equations(3, 5000, (0, 1, 2)),
    "two codebooks in turn": equations(0, 1024, (1024, 1500, 2000)),
}
WIDE: dict[str, Ids] = {
    "128,256 ids": zipf(128_256, 20_000),
    "100 of 128,256 ids": zipf(128_256, 100),
    "256,000 ids": zipf(256_000, 20_000, 1.0),
    "items": np.random.default_rng(6).integers(0, 10**7, 20_000),
    "a few above 65,535": np.random.default_rng(7).integers(0, 70_000, 5000),
    "padded by a high id": padded(zipf(128_256, 10_000), pad=128_001),
}
WIDE_ENOUGH = {"uint8": 8, "uint16": 16, "uint32": 24, "int64": 24}


def found(ids: Ids, dtype: str) -> tuple[str, bool] | None:
    one = detect_dtype(ids.astype(dtype).tobytes())
    return None if one is None else (one.dtype, one.big_endian)


@pytest.mark.parametrize("name", NARROW)
def test_no_right_file_is_taken_for_another_dtype(name: str) -> None:
    ids = NARROW[name]
    for dtype in ("uint8", "uint16", "uint32", "int64"):
        if int(ids.max()) < 2 ** WIDE_ENOUGH[dtype]:
            assert found(ids, f"<{np.dtype(dtype).str[1:]}") in (None, (dtype, False)), dtype


@pytest.mark.parametrize("name", [*WIDE, "words", "characters", "padded", "many zeros", "bits"])
def test_wide_ids_are_known_for_certain(name: str) -> None:
    """In either byte order, of short files too; also of a small vocabulary in a wide dtype."""
    ids = {**NARROW, **WIDE}[name]
    for code, dtype in (("u4", "uint32"), ("i8", "int64")):
        assert found(ids, f"<{code}") == (dtype, False)
        assert found(ids, f">{code}") == (dtype, True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_ids_that_were_saved_as_floats_are_refused(folder: Path, dtype: str) -> None:
    """Else float32 was told as big-endian uint32, and float16 was read as uint16."""
    ids = zipf(2000, 20_000).astype(dtype)
    assert detect_dtype(ids.tobytes()[:80_000]).dtype == dtype
    ids.tofile(folder / "train.bin")
    with pytest.raises(ConfigError) as refusal:
        check_dtype(str(folder / "train.bin"), "uint16", "data.dtype")
    code = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]
    assert f"it was written as {dtype}: read as floats, all numbers are whole; try: " in str(
        refusal.value
    )
    assert f"'{code}').astype('<u4').tofile(…), data.dtype=uint32" in str(refusal.value)


def test_bytes_and_swapped_bytes_are_known() -> None:
    assert found(np.frombuffer(Path(os.__file__).read_bytes(), np.uint8), "u1") == ("uint8", False)
    for name in ("words", "characters", "counting"):
        assert found(NARROW[name], ">u2") in (
            (None,) if name == "counting" else (("uint16", True),)
        )
    assert detect_dtype(np.random.default_rng(8).bytes(50_000)) is None, "noise"
    assert detect_dtype(b"") is detect_dtype(b"1234567") is None


def test_uint32_that_is_read_as_uint16_is_refused(folder: Path) -> None:
    """Unless data.dtype says so: then the ids and the samples are right."""
    ids = WIDE["128,256 ids"]
    ids.astype("<u4").tofile(folder / "train.bin")
    with pytest.raises(ConfigError) as caught:
        open_data(f"tokens:{folder}", sequence=7)
    assert str(caught.value) == (
        f"{folder / 'train.bin'}: read as uint16 (default), but it was written as uint32: every "
        f'second 16-bit number is a high half, at most 1; try: dtype="uint32"'
    )
    data = open_data(f"tokens:{folder}", sequence=7, dtype="uint32", validation=0)
    assert data.train[1][0].tolist() == ids[7:14].tolist()
    assert data.vocabulary == int(ids.max()) + 1
    (folder / "meta.json").write_text('{"dtype": "uint32"}')
    assert open_data(f"tokens:{folder}", sequence=7).vocabulary == data.vocabulary
    with pytest.raises(ConfigError, match=r"read as uint16 \(dtype\), but .* uint32"):
        open_data(f"tokens:{folder}", sequence=7, dtype="uint16")


def earlier_key(*parts: Any) -> str:
    return content_key(*(part for part in parts if part != "dtype checked"))


def test_a_file_that_was_scanned_by_an_earlier_version_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 kept in the cache what it found in a file that it read as uint16."""
    WIDE["128,256 ids"].astype("<u4").tofile(folder / "train.bin")
    with monkeypatch.context() as earlier:
        earlier.setattr("shoal.data.files.token_files.check_dtype", lambda *_: None)
        earlier.setattr("shoal.data.files.token_files.content_key", earlier_key)
        open_folder(str(folder), 0.1)
    with pytest.raises(ConfigError, match="written as uint32"):
        open_folder(str(folder), 0.1)


OTHERS = [
    ("<u4", "uint16", "uint32: .*; try: data.dtype=uint32"),
    ("<i8", "uint16", "int64: .*; try: data.dtype=int64"),
    ("<i8", "uint32", "int64: .*; try: data.dtype=int64"),
    ("<i8", "int32", "int64: .*; try: data.dtype=int64"),
    ("<u4", "int64", "uint32: .*; try: data.dtype=uint32"),
    ("<u2", "uint32", "uint16: .*; try: data.dtype=uint16"),
    ("<u2", "int64", "uint16: .*; try: data.dtype=uint16"),
    ("<u2", "uint8", "uint16: .*; try: data.dtype=uint16"),
    (">u2", "uint16", r"big-endian uint16: .*; try: numpy.fromfile\(.*, '>u2'\).astype\('<u2'\)"),
    (">u4", "uint32", r"big-endian uint32: .*; try: numpy.fromfile\(.*, '>u4'\).astype\('<u4'\)"),
    (">u4", "uint16", "big-endian uint32"),
    (">i8", "int64", "big-endian int64"),
    ("u1", "uint16", "uint8: .*; try: data.dtype=uint8, or data.source=text:.*val.bin if it is"),
    ("u1", "uint32", "uint8: .*"),
]
SHORT = [OTHERS[0], OTHERS[4], OTHERS[5], OTHERS[8]]


@pytest.mark.parametrize(
    ("code", "read", "text"),
    [pytest.param(*row, marks=[] if row in SHORT else [pytest.mark.proof("faults")]) for row in OTHERS],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["words", "characters"])
def test_a_file_that_is_read_by_another_dtype_is_refused(
    folder: Path, kind: str, code: str, read: str, text: str
) -> None:
    """By the key or a meta.json; in the file that is wrong, be it for validation alone."""
    ids = NARROW[kind]
    if code == "u1":
        ids = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8).astype(np.int64)
    ids[: len(ids) // 8 * 8].astype(code).tofile(folder / "val.bin")
    ids.astype(np.dtype(read)).tofile(folder / "train.bin")
    with pytest.raises(ConfigError, match=rf"val.bin: read as {read} \(data.dtype\).* as {text}"):
        open_folder(str(folder), 0.1, dtype=read)
    (folder / "meta.json").write_text(json.dumps({"dtype": read}))
    with pytest.raises(ConfigError, match=rf"val.bin: read as {read} \(as .*meta.json says\)"):
        open_folder(str(folder), 0.1)


def test_right_files_open_without_a_word(folder: Path) -> None:
    for dtype in ("uint16", "uint32", "int32", "int64"):
        for name, ids in NARROW.items():
            ids.astype(f"<{np.dtype(dtype).str[1:]}").tofile(folder / "train.bin")
            opened = open_folder(str(folder), 0.1, dtype=dtype)
            assert opened.vocabulary == int(ids.max()) + 1, (name, dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "hint"),
    [
        (1001, "uint16", "1001 bytes; try: data.dtype=uint8, or copy it again"),
        (1002, "uint32", "1002 bytes; try: data.dtype=uint16"),
        (1004, "int64", "1004 bytes; try: data.dtype=uint32"),
    ],
)
def test_a_size_that_is_no_number_of_tokens(folder: Path, size: int, dtype: str, hint: str) -> None:
    (folder / "train.bin").write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=f"train.bin: cannot be read as {dtype} tokens: .*{hint}"):
        open_folder(str(folder), 0.1, dtype=dtype)


def test_ids_that_no_vocabulary_has_name_the_key(folder: Path) -> None:
    np.array([5, 2**25, 7], dtype="<u4").tofile(folder / "train.bin")
    with pytest.raises(
        ConfigError, match="token id 33554432 at 1: ids are .*; try: data.dtype=uint8"
    ):
        open_folder(str(folder), 0.1, dtype="uint32")


def headed(magic: int, version: int, ids: Any, count: int | None = None) -> bytes:
    """A file of llm.c: 256 int32, the third of which counts the tokens, then these."""
    tokens = len(ids) if count is None else count
    return np.array([magic, version, tokens, *[0] * 253], dtype="<i4").tobytes() + ids.tobytes()


def indexed(folder: Path, ids: Any, code: int, lengths: list[int]) -> None:
    """A file of Megatron-LM and its index."""
    ids.tofile(folder / "train_text_document.bin")
    counts = [(1).to_bytes(8, "little"), bytes([code]), len(lengths).to_bytes(8, "little")]
    offsets = np.cumsum([0, *lengths[:-1]]) * ids.dtype.itemsize
    rest = [
        np.array(lengths, "<i4"),
        offsets.astype("<i8"),
        np.arange(len(lengths) + 1, dtype="<i8"),
    ]
    (folder / "train_text_document.idx").write_bytes(
        b"".join([b"MMIDIDX\x00\x00", *counts, (len(lengths) + 1).to_bytes(8, "little")])
        + b"".join(one.tobytes() for one in rest)
    )


@pytest.mark.parametrize(
    ("magic", "version", "vocabulary", "dtype"),
    [(20240520, 1, 50_257, "uint16"), (20240801, 7, 128_256, "uint32")],
)
def test_files_of_llm_c_are_read_without_their_header(
    folder: Path, magic: int, version: int, vocabulary: int, dtype: str
) -> None:
    ids = zipf(vocabulary, 500).astype(np.dtype(dtype).newbyteorder("<"))
    (folder / "train.bin").write_bytes(headed(magic, version, ids))
    (folder / "val.bin").write_bytes(headed(magic, version, ids[:100]))
    found = open_folder(str(folder), 0.1)
    assert found.train[0].open().tolist() == ids.tolist()
    assert found.validation[0].open().tolist() == ids[:100].tolist()
    data = open_data(f"tokens:{folder}", sequence=7)
    assert data.train[0][0].tolist() == ids[:7].tolist()
    other = "uint32" if dtype == "uint16" else "uint16"
    with pytest.raises(
        ConfigError, match=rf"read as {other} \(data.dtype\), but the header of llm.c"
    ):
        open_folder(str(folder), 0.1, dtype=other)
    (folder / "val.bin").write_bytes(headed(magic, version, ids[:100], count=101))
    with pytest.raises(ConfigError, match="counts 101 tokens of .*; try: copy it again"):
        open_folder(str(folder), 0.1)


@pytest.mark.parametrize(("code", "dtype"), [(8, "uint16"), (4, "int32"), (5, "int64")])
def test_files_of_megatron_are_read_by_their_index(folder: Path, code: int, dtype: str) -> None:
    ids = zipf(1000, 500).astype(dtype)
    indexed(folder, ids, code, [200, 250, 50])
    assert open_folder(str(folder), 0.0).train[0].open().tolist() == ids.tolist()
    indexed(folder, ids, code, [200, 250])
    with pytest.raises(ConfigError, match="counts 450 tokens"):
        open_folder(str(folder), 0.0)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (headed(20240522, 1, zipf(50257, 500).astype("<u2")),
         "header of llm.c's evaluations, magic 20240522: 1024 bytes that are no tokens"),
        (b"\x93NUMPY" + bytes(2000), "is NumPy .npy, not raw token ids; try: name it .npy"),
        (b"PK\x03\x04" + b"archive/data.pkl" + bytes(200), "is torch.save, not raw token ids"),
        (b"\x28\xb5\x2f\xfd" + bytes(201), "is Zstandard, not .*; try: zstd -d "),
    ],
)  # fmt: skip
def test_headers_and_formats_are_named(folder: Path, read: bytes, text: str) -> None:
    (folder / "train.bin").write_bytes(read)
    with pytest.raises(ConfigError, match=text):
        open_folder(str(folder), 0.1)


@pytest.mark.parametrize("code", [2, 6])
def test_a_megatron_index_of_other_numbers_is_named(folder: Path, code: int) -> None:
    ids = zipf(100, 500).astype("int8" if code == 2 else "float64")
    indexed(folder, ids, code, [500])
    with pytest.raises(ConfigError, match="belongs to Megatron-LM's index train_text_document.idx"):
        open_folder(str(folder), 0.1)
    zipf(100, 500).astype("uint8").tofile(folder / "train_text_document.bin")
    (folder / "train_text_document.idx").write_bytes(b"another index")
    assert open_folder(str(folder), 0.1, dtype="uint8").vocabulary <= 100


def test_a_key_that_nothing_reads_is_refused(folder: Path) -> None:
    zipf(128_256, 500).astype("<u4").tofile(folder / "train.bin")
    zipf(128_256, 500).astype("<u4").tofile(folder / "val.bin")
    tokens = f"tokens:{folder}"
    with pytest.raises(ConfigError) as caught:
        check_data(DataSection(dtype="uint32"))
    assert str(caught.value) == (
        "data.dtype = uint32: is of the .bin files of tokens:FOLDER; data.source = stdlib has "
        "none; try: data.dtype=auto"
    )
    parts: dict[str, Any] = {"sequence": 7, "dtype": "uint32"}
    mixed = open_data(f"mix:0.5*{tokens}+0.5*synthetic", **parts)
    assert mixed.vocabulary == 128_256 or mixed.vocabulary > 65_536
    np.save(folder / "train.npy", zipf(50_000, 500).astype("<u2"))  # says its dtype itself
    assert len(open_data(tokens, **parts).train) == 2 * (499 // 7)
    np.save(folder / "val.npy", zipf(128_256, 500))
    assert open_data("synthetic", validation="synthetic", sequence=7).vocabulary == 2048
