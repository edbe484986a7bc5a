"""Text is read once: kept where there is little, and sampled by places where there is much."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.sections import DataSection
from shoal.data.files import tokenizer_cache
from shoal.data.files.documents import Document, glob_documents, spread_ranges
from shoal.data.files.tokenizer_cache import NewEntry
from shoal.data.sources import open_source
from shoal.data.text import single_pass_text, text_rows
from shoal.data.text.single_pass_text import (
    SinglePassTexts,
    choose_sample_rule,
    sample_texts_at_places,
)
from shoal.data.text.text_rows import split_row_documents

LINES = [f"number {n}: " + "the tide comes in, größe €; " * (n % 9) for n in range(600)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of 600 lines, and what is sampled of them: 8 KiB at 16 places."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(single_pass_text, "TRAIN_CHARACTERS", 2**13)
    monkeypatch.setattr(single_pass_text, "PLACES", 16)
    for number in range(3):
        made = [json.dumps({"id": n, "text": t}) for n, t in enumerate(LINES) if n % 3 == number]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(made) + "\n")
        (tmp_path / f"{number}.txt").write_text("\n".join(LINES[number::3]))
    return tmp_path


def opened(source: str, **more: Any) -> Any:
    settings = {"validation": "0.2", "tokenizer": "bpe:300", "sequence": 16, **more}
    return open_source(DataSection(source=source, **settings), 0)


@pytest.mark.parametrize("share", ["0", "0.2"])
@pytest.mark.parametrize("kept", [True, False])
def test_every_line_is_read_once_and_twice_where_it_is_not_kept(
    files: Path, monkeypatch: pytest.MonkeyPatch, share: str, kept: bool
) -> None:
    read: Counter[str] = Counter()
    real = text_rows.TextRows.rows

    def counted(document: text_rows.TextRows, keys: Any = ()) -> Any:
        for place, row in real(document, keys):
            read[place] += 1
            yield place, row

    monkeypatch.setattr(text_rows.TextRows, "rows", counted)
    if not kept:
        monkeypatch.setattr(single_pass_text, "KEPT_CHARACTERS", 1000)
    source = opened(f"jsonl:{files}/*.jsonl", validation=share)
    first = read.pop(f"{files}/0.jsonl:1")
    assert set(read.values()) == {1 if kept else 2}
    assert first == (3 if kept else 4), "once for the form, and once before the field is known"
    monkeypatch.setenv("SHOAL_CACHE", str(files / "other"))
    monkeypatch.setattr(single_pass_text, "KEPT_CHARACTERS", 2**28 if not kept else 0)
    again = opened(f"jsonl:{files}/*.jsonl", validation=share)
    ids, others = ([span.open() for span in one.train.spans] for one in (source, again))
    assert np.array_equal(np.concatenate(ids), np.concatenate(others))


def test_of_much_text_some_places_are_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = split_row_documents("jsonl", f"{files}/*.jsonl", "text", 0.2)[0]
    assert choose_sample_rule(documents) == "whole"
    monkeypatch.setattr(single_pass_text, "WHOLE_BYTES", 2**15)
    assert choose_sample_rule(documents) == "places"
    some = list(SinglePassTexts(documents, []).sample())
    assert some == list(sample_texts_at_places(documents)), "the same every time"
    assert len(set(some)) == len(some), "no line twice"
    mine = [text for document in documents for text in document.texts()]
    assert set(some) < set(mine), "whole lines of the training side"
    total = sum(document.size_bytes for document in documents)
    wanted = 2**13 * len("".join(mine).encode()) / total
    assert 0.6 * wanted < len("".join(some).encode()) < 1.6 * wanted
    numbers = [int(text.split()[1][:-1]) for text in some]
    assert {n % 3 for n in numbers} == {0, 1, 2}, "of every file"
    assert min(numbers) < 90, "from front …"
    assert max(numbers) > 510, "… to back"


def test_how_much_was_sampled_changes_the_key(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(f"jsonl:{files}/*.jsonl").train.spans[0].path
    monkeypatch.setattr(single_pass_text, "WHOLE_BYTES", 2**15)
    assert opened(f"jsonl:{files}/*.jsonl").train.spans[0].path != first


def test_bytes_that_are_read_of_much_text(files: Path) -> None:
    """By what the system counts, of JSON lines and of plain files."""
    counter = Path("/proc/self/io")
    if not counter.exists():
        pytest.skip("the system does not tell")

    def read() -> int:
        return int(counter.read_text().split()[1])

    draw = random.Random(0)
    for number in range(4):
        text = "".join(draw.choices("abcdef \n", k=2**20))
        (files / f"large{number}.txt").write_text(text)
        (files / f"large{number}.jsonl").write_text(
            "".join(json.dumps({"text": text[at : at + 400]}) + "\n" for at in range(0, 2**20, 400))
        )
    plain: list[Document] = glob_documents(f"{files}/large*.txt")
    lines = split_row_documents("jsonl", f"{files}/large*.jsonl", "text", 0.0)[0]
    for documents, most in ((plain, 2**13 + 2**12), (lines, 2**13 + 16 * 2**14)):
        before = read()
        some = list(sample_texts_at_places(documents))
        assert read() - before < most
        assert 2**12 < sum(map(len, some)) < 2**14


@pytest.mark.parametrize("whole_bytes", [2**15, 2**27])
def test_of_rows_that_are_longer_than_the_sample_a_head_is_taken(
    files: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    monkeypatch.setattr(single_pass_text, "WHOLE_BYTES", whole_bytes)
    text = "".join(LINES) * 3
    (files / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    documents = split_row_documents("jsonl", f"{files}/long.jsonl", "text", 0.0)[0]
    assert [one for one in SinglePassTexts(documents, []).sample() if one] == [text[: 2**13]]


def test_a_packed_file_is_sampled_at_its_front(files: Path) -> None:
    whole = (files / "0.jsonl").read_bytes()
    (files / "p.jsonl.gz").write_bytes(gzip.compress(whole))
    documents = split_row_documents("jsonl", f"{files}/p.jsonl.gz", "text", 0.0)[0]
    some, texts = list(sample_texts_at_places(documents)), [t for d in documents for t in d.texts()]
    assert 1 < len(some) < len(texts)
    assert some == texts[: len(some)]


def test_places_are_spread_and_cut_at_the_ends_of_files() -> None:
    sizes = [10, 0, 100, 3, 87]
    documents = [Document(str(n), str(n), size, 0) for n, size in enumerate(sizes)]
    found = spread_ranges(documents, 10, 100)
    assert sum(stop - start for _, start, stop in found) == 100
    assert all(0 <= start < stop <= d.size_bytes for d, start, stop in found)
    fronts = dict(zip("01234", np.cumsum([0, *sizes]).tolist(), strict=False))
    taken = [b for d, a, o in found for b in range(fronts[d.name] + a, fronts[d.name] + o)]
    assert taken == sorted(set(taken))
    assert np.diff([fronts[d.name] + a for d, a, _ in found]).max() <= 20


def test_a_piece_ends_with_a_whole_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("größe\r\n€uro".encode())
    document = Document.of(path, tmp_path)
    assert document.read_range(0, 3) == "gr"
    assert document.read_range(3, 11) == "ße\n"
    assert document.read_range(0, 99) == "größe\n€uro"


def test_an_arrays_checksum_is_taken_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, array = NewEntry(tmp_path), np.arange(10**5, dtype=np.uint16)[::-1]
    monkeypatch.setattr(
        tokenizer_cache, "CHECKED_BYTES", 10**4
    )  # of a larger file the size must do
    path = entry.save_array("ids", array)
    told = entry.fingerprints()
    assert told == {"ids.npy": tokenizer_cache._fingerprint(path)}
    assert np.array_equal(np.load(path), array)
    monkeypatch.setattr(tokenizer_cache, "_fingerprint", None)
    assert entry.fingerprints() == told, "without reading it"


def test_a_flipped_byte_of_an_array_is_found_by_a_later_start(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"jsonl:{files}/*.jsonl"
    path = Path(opened(source).train.spans[0].path)
    good, when = path.read_bytes(), path.stat()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    opened(source)
    assert path.read_bytes() == good
    boot = files / "boot_id"
    boot.write_text("another start of the machine")
    with path.open("r+b") as file:  # what a crash left, and no time tells of it
        file.seek(-1, 2)
        file.write(bytes([good[-1] ^ 1]))
    mark = path.parent.with_name(f"{path.parent.name}.checked")
    mark.write_text(
        tokenizer_cache._entry_stamp(
            path.parent, json.loads((path.parent / "meta.json").read_text())["files"]
        )
    )
    monkeypatch.setattr(tokenizer_cache, "BOOT", boot)
    opened(source)
    assert path.read_bytes() == good
    assert when.st_size == path.stat().st_size


@pytest.mark.proof
def test_of_much_parquet_some_row_groups_are_begun(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from shoal.data.files import row_files

    monkeypatch.setattr(row_files, "LEAST_PAGE", 2**12)
    monkeypatch.setattr(row_files, "PAGE_ROWS", 4)
    for number in range(3):
        made = [{"id": n, "text": t * 9} for n, t in enumerate(LINES) if n % 3 == number]
        parquet.write_table(
            arrow.Table.from_pylist(made), files / f"{number}.parquet", row_group_size=40,
            compression="none", use_dictionary=False, data_page_size=2**12, write_batch_size=4,
        )  # fmt: skip
    documents = split_row_documents("parquet", f"{files}/*.parquet", "text", 0.0)[0]
    some = list(sample_texts_at_places(documents))
    numbers = [int(text.split()[1][:-1]) for text in some]
    assert some == list(sample_texts_at_places(documents))
    assert 2**12 < sum(map(len, some)) < 2**14
    assert len({number // 40 for number in numbers}) > 1
    monkeypatch.setattr(row_files, "LEAST_PAGE", 2**30)  # then one is all there is bytes for
    assert len({int(text.split()[1][:-1]) % 3 for text in sample_texts_at_places(documents)}) == 1


@pytest.mark.proof
def test_of_a_begun_row_group_only_pages_are_read(files: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    counter = Path("/proc/self/io")
    if not counter.exists():
        pytest.skip("the system does not tell")
    made = arrow.table({"text": [f"number {n}: " * 90 for n in range(9000)]})
    path = files / "large.parquet"
    parquet.write_table(made, path, compression="none", use_dictionary=False)
    documents = split_row_documents("parquet", str(path), "text", 0.0)[0]
    list(sample_texts_at_places(documents))  # imports
    before = int(counter.read_text().split()[1])
    assert list(sample_texts_at_places(documents))
    assert int(counter.read_text().split()[1]) - before < path.stat().st_size // 4


@pytest.mark.proof
def test_the_form_of_parquet_is_told_by_its_columns(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist([{"id": 1, "prompt": "a", "completion": "b"}])
    parquet.write_table(table.slice(0, 0), files / "a.parquet")
    parquet.write_table(table, files / "b.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    documents = split_row_documents("parquet", f"{files}/?.parquet", "", 0.0)[0]
    assert text_rows.find_form(documents, "") == text_rows.PAIR


@pytest.mark.proof
def test_hf_rows_are_sampled_evenly(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(files / "home"))
    made = [{"text": text * 9} for text in LINES]
    datasets.Dataset.from_list(made).save_to_disk(files / "saved")
    documents = split_row_documents("hf", f"{files}/saved", "text", 0.0)[0]
    some = list(sample_texts_at_places(documents))
    numbers = [int(text.split()[1][:-1]) for text in some]
    assert numbers == sorted(numbers)
    assert max(np.diff(numbers)) - min(np.diff(numbers)) <= 1
    assert 2**12 < sum(map(len, some)) < 2**14
